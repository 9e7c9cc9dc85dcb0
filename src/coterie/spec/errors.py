"""The one exception type for what a user gave us and we cannot run; it names the field and what is possible."""


class CoterieError(Exception):
    """A user's mistake or an impossible request, said in one line."""


class SpecError(CoterieError):
    """A model description that is unknown, incomplete or contradictory."""
