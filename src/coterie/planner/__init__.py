"""The planner: will a model fit, how fast will it be, what to deploy. Arithmetic on descriptions; loads no weights."""
