"""Rows of the user's own parquet files, by their hash."""

from stages.sources.local import origin, rows

__all__ = ["origin", "rows"]
