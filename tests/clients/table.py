"""The table of clients and abilities as Markdown, and read again. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from tests.clients.catalogue import ABILITIES

YES: Final = "yes"
NOT_OFFERED: Final = "–"
Outcomes = Mapping[str, Mapping[str, str]]
"""By client and ability: `yes`, or `no: ` and why; what is not there is not offered by the client."""


def render(outcomes: Outcomes, versions: Mapping[str, str]) -> str:
    """Return the table, and below it why something does not work."""
    names = list(outcomes)
    reasons: list[str] = []
    lines = [["", *names], ["version", *(versions[name] for name in names)]]
    for key, title in ABILITIES.items():
        cells = [_cell(outcomes[name].get(key, NOT_OFFERED), reasons) for name in names]
        lines.append([title, *cells])
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    rows.insert(1, "|" + "---|" * len(lines[0]))
    notes = [f"| {index} | {reason} |" for index, reason in enumerate(reasons, start=1)]
    why = ["", "| no | why |", "|---|---|", *notes] if notes else []
    return "\n".join([*rows, *why]) + "\n"


def read(text: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the outcomes that a table has; each `no` without its reason.

    Args:
        text: with the table in it.
        names: of the clients, in the order of the columns.
    """
    titles = {title: key for key, title in ABILITIES.items()}
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for line in text.splitlines():
        title, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if title in titles and len(cells) == len(names):
            for name, cell in zip(names, cells, strict=True):
                if cell != NOT_OFFERED:
                    found[name][titles[title]] = cell.partition(" ")[0]
    return found


def _cell(outcome: str, reasons: list[str]) -> str:
    if not outcome.startswith("no: "):
        return outcome
    reason = _plain(outcome.removeprefix("no: "))
    if reason not in reasons:
        reasons.append(reason)
    return f"no ({reasons.index(reason) + 1})"


def _plain(reason: str) -> str:
    """Return a sentence that is no markup, is the same in each run, and has no prefix that other libraries have not."""
    own = re.sub(r"Error code: \d+ - |litellm\.\w+: \w+ - |(?<=: )\d{3} ", "", reason)
    same = re.sub(r"\b(chatcmpl-|req_|call_)\w+|127\.0\.0\.1:\d+", "…", own)
    return "`" + same.replace("`", "'").replace("|", "/") + "`"
