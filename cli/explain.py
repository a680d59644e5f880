"""`sluice explain`: what an error means, how to see why it came, and what to do, from `docs/troubleshooting.md`."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import Final

import click

from cli.exit_codes import DONE, REFUSED, CommandError

EPILOG: Final = """\b
Examples:
  sluice explain                               the errors that are explained
  sluice explain queue_full                    one of them: the code of an answer, or what a command's line ends with
"""


@click.command(epilog=EPILOG)
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON: the texts by their codes.")
def explain(*, code: str | None, as_json: bool) -> int:
    """Say what an error means, how to see why it came, and what to do."""
    from shared.troubleshooting import sections

    known = sections()
    code = code and code.lower()
    if code is not None and code not in known:
        near = get_close_matches(code, known, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        if re.fullmatch(r"[1-5]\d\d", code):
            hint = "Several errors share a status; the answer's `code` says which one it is. "
        raise CommandError(f"no error is called '{code[:80]}'", f"{hint}`sluice explain` lists them all", REFUSED)
    chosen = known if code is None else {code: known[code]}
    if as_json:
        click.echo(json.dumps(chosen))
    else:
        click.echo("\n".join(known) if code is None else _without_links(known[code]), nl=code is None)
    return DONE


def _without_links(text: str) -> str:
    """Return Markdown as it is read in a terminal: a link is its words and where it leads."""
    text = re.sub(r"\[(.+?)\]\(#.*?\)", r"\1", text)
    text = re.sub(r"\[(\S+)\]\(\1\)", r"docs/\1", text)
    text = re.sub(r"\(\[(.+?)\]\((\S+?)\)\)", r"(\1: docs/\2)", text)
    return re.sub(r"\[(.+?)\]\((\S+?)\)", r"\1 (docs/\2)", text)
