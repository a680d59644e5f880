"""Text as it lies in the cells of a terminal: how wide it is, cut, and made of styled spans. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from wcwidth import wcwidth


class Span(NamedTuple):
    """Some text of a line in one style."""

    text: str
    style: str = ""
    """As `Console.style` takes it; empty: as the terminal has it."""


Line = tuple[Span, ...]
"""One line, from the left."""


def clean(text: str) -> str:
    """Return the text with `?` for what steers a terminal or cannot be seen: names come from outside."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def width_of(text: str) -> int:
    """Return how many cells a text takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(char: str) -> int:
    return max(wcwidth(char), 0)


def cut(text: str, width: int) -> str:
    """Return as much of a text as so many cells hold; if that is not all of it, `…` is at its end."""
    if width_of(text) <= width:
        return text
    kept, left = "", width - 1
    for char in text:
        left -= _cells(char)
        if left < 0:
            break
        kept += char
    return f"{kept}…" if width > 0 else ""


def pad(text: str, width: int, *, is_right: bool = False) -> str:
    """Return a text in exactly so many cells, at their left or right end."""
    text = cut(text, width)
    blank = " " * (width - width_of(text))
    return blank + text if is_right else text + blank


def cut_line(spans: Iterable[Span], width: int) -> Line:
    """Return as much of a line as so many cells hold."""
    kept: list[Span] = []
    for span in spans:
        text = cut(span.text, width)
        if text:
            kept.append(Span(text, span.style))
        width -= width_of(text)
        if text != span.text:
            break
    return tuple(kept)


def join_parts(label: Span, parts: Sequence[Sequence[Span]], width: int, gap: str = "  ") -> Line:
    """Return a line of a label and as many parts as find room; the first one is cut if it finds none."""
    line, left = [label], width - width_of(label.text)
    for number, part in enumerate(parts):
        needed = sum(width_of(span.text) for span in part) + (len(gap) if number else 0)
        if needed > left and number:
            break
        line += [Span(gap), *part] if number else part
        left -= needed
    return cut_line(line, width)


def plain(line: Line) -> str:
    """Return the text of a line, without blanks at its end."""
    return "".join(span.text for span in line).rstrip()
