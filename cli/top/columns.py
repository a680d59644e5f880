"""Tables that take the width that there is: the columns that matter most first, a name in what is left. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from cli.top.figures import NONE
from cli.top.text import Line, Span, clean, cut_line, pad, width_of

Row = TypeVar("Row")
GAP: Final = 2
MIN_NAME: Final = 12
"""Cells of the first column, if its names are as long."""
MAX_CELL: Final = 24
"""Of every other one."""


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """What one column of a table says of a row."""

    title: str
    cell: Callable[[Row], str]
    rank: int
    """Columns of lower rank find room first; the first column of a table always does."""
    least: int = 0
    """Cells that it takes even if nothing in it is as wide, so that columns stand still."""
    is_right: bool = True
    style: Callable[[Row], str] = lambda _: ""
    shorten: Callable[[str], str] = lambda text: text
    """Says what is cut of a cell that finds no room."""


def draw_table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, sorted_by: str, num_all: int
) -> list[Line]:
    """Return the head and a line per row; columns without a word in them are left out, but for those that stand still.

    Args:
        columns: in their order; the first holds names, and gets what is left of the width.
        rows: sorted, and no more than are to be seen.
        width: in cells.
        sorted_by: title of a column, which is marked.
        num_all: rows that there are; the head says how many of them are seen.
    """
    if num_all > len(rows):
        seen = replace(columns[0], title=f"{columns[0].title} {len(rows)}/{num_all}")
        columns = [seen, *columns[1:]]
    cells = {column.title: [clean(column.cell(row)) for row in rows] for column in columns}
    widths = _widths(columns, cells, width)
    shown = [column for column in columns if column.title in widths]
    head: list[Span] = []
    for column in shown:
        style = "reverse" if column.title != sorted_by else "marked"
        head += [Span(pad(column.title, widths[column.title], is_right=column.is_right), style), _gap("reverse")]
    lines = [_whole(head[:-1], width, "reverse")]
    for index, row in enumerate(rows):
        spans: list[Span] = []
        for column in shown:
            text = cells[column.title][index]
            if width_of(text) > widths[column.title]:
                text = column.shorten(text)
            text = pad(text, widths[column.title], is_right=column.is_right)
            spans += [Span(text, column.style(row)), _gap()]
        lines.append(cut_line(spans[:-1], width))
    return lines


def _gap(style: str = "") -> Span:
    return Span(" " * GAP, style)


def _whole(spans: list[Span], width: int, style: str) -> Line:
    """Return the line over the whole width."""
    line = cut_line(spans, width)
    left = width - sum(width_of(span.text) for span in line)
    return (*line, Span(" " * left, style)) if left > 0 else line


def _widths(columns: Sequence[Column[Row]], cells: dict[str, list[str]], width: int) -> dict[str, int]:
    """Return how wide each column is that finds room, by its title."""
    first = columns[0]
    wanted = max([width_of(first.title), *map(width_of, cells[first.title])])
    found = {first.title: min(wanted, max(MIN_NAME, first.least))}
    left = width - found[first.title]
    for column in sorted(columns[1:], key=lambda column: column.rank):
        texts = cells[column.title]
        if not column.least and all(text == NONE for text in texts):
            continue
        needed = min(max([column.least, width_of(column.title), *map(width_of, texts)]), MAX_CELL)
        if needed + GAP > left:
            break
        found[column.title] = needed
        left -= needed + GAP
    found[first.title] += max(min(left, wanted - found[first.title]), 0)
    return found
