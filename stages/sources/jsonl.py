"""Rows of the user's own JSON-lines files, by their hash."""

from stages.sources.local import origin, rows

__all__ = ["origin", "rows"]
