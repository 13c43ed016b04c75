"""The one exception that stands for a mistake its reader can mend."""


class UserError(Exception):
    """A mistake in input, profile or surroundings: its text says what to do; the exit code is 2."""
