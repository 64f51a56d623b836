# SPDX-License-Identifier: Apache-2.0
"""How tables are written: their lines in Markdown, and times and names in cells."""

from collections.abc import Iterable, Sequence

from chosen_rows import NoRowsError, Row


def format_ms(value: float | None) -> str:
    """Three significant digits, or a dash for what did not run."""
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def time_cell(row: Row | None) -> str:
    """Return the cell of a row's median."""
    return format_ms(None if row is None else float(row["p50_ms"]))


def short_name(model: str) -> str:
    """Return a model's name without what all Qwen models share."""
    return model.removeprefix("Qwen/").removesuffix("-Instruct")


def table_head(names: Sequence[str]) -> list[str]:
    """Return the two lines that begin a table."""
    return [table_line(names), "|" + "---|" * len(names)]


def written(lines: Sequence[str]) -> str:
    """Return a table of `table_head` and lines below it.

    Raises:
        NoRowsError: There is no line below the head.
    """
    if len(lines) == 2:
        raise NoRowsError("the file has no rows of what this table compares")
    return "\n".join(lines)


def table_line(cells: Iterable[str]) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"
