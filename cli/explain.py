"""`sluice explain`: what an error means, how to see why it came, and what to do, from `docs/troubleshooting.md`."""

from __future__ import annotations

import json
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
    if code is not None and code not in known:
        near = get_close_matches(code, known, cutoff=0.5)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        raise CommandError(f"no error is called '{code[:80]}'", f"{hint}`sluice explain` lists them all", REFUSED)
    chosen = known if code is None else {code: known[code]}
    if as_json:
        click.echo(json.dumps(chosen))
    else:
        click.echo("\n".join(known) if code is None else known[code], nl=code is None)
    return DONE
