"""Rows of a data set of a model hub, fetched at its commit: its training split, never another."""

from collections.abc import Iterator
from typing import Any

from stages.profile import DataSource
from stages.sources import Context, Rejected, Row, fetched


def rows(source: DataSource, context: Context) -> Iterator[Row | Rejected]:
    """Yield the conversations of the split, in a seeded order.

    Raises:
        UserError: the split or a file of it is for evaluation, or a named column is not there.
    """
    return fetched.rows(source, context, "hub")


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Return what the lock declares, the split, and the files that were read."""
    return fetched.origin(source, context)
