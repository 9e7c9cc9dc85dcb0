"""Routing, dispatch, experts and combine: the only MoE forward."""
