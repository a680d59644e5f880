"""What `docs/troubleshooting.md` says of each error, for `sluice explain` and the dispatcher's `/errors/CODE`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

PAGE: Final = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
"""In a checkout, an image and an installation alike."""
_HEADING: Final = re.compile(r"^##.*\n", re.MULTILINE)
_NAME: Final = re.compile(r"### ([a-z0-9_]+)\n")


def cut(page: str) -> dict[str, str]:
    """Return the text of each `### name` of a page, as Markdown; names that stand together share the one below them."""
    found: dict[str, str] = {}
    waiting: list[str] = []
    headings = list(_HEADING.finditer(page))
    ends = [heading.start() for heading in headings[1:]] + [len(page)]
    for heading, end in zip(headings, ends, strict=True):
        name = _NAME.fullmatch(heading[0])
        waiting = [*waiting, name[1]] if name else []
        text = page[heading.end() : end].strip()
        if text:
            found |= {each: f"# {each}\n\n{text}\n" for each in waiting}
            waiting = []
    return found


@cache
def sections() -> Mapping[str, str]:
    """Return the page's, by code of the API or topic of a command."""
    return cut(PAGE.read_text(encoding="utf-8"))
