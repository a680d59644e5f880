"""The commands about models on this machine, as the command line knows them: `sluice pull` and `ls`."""

from __future__ import annotations

import click

PULL_EPILOG = """\b
Examples:
  sluice pull owner/name                       into the hub's cache
  sluice pull owner/name --revision v1.0       a branch, a tag or a commit
  sluice pull owner/name --to ./model          into a folder

HF_TOKEN is sent for gated and private models; HF_ENDPOINT names another hub; HF_HUB_OFFLINE=1 uses the cache only.
"""

LS_EPILOG = """\b
Examples:
  sluice ls                                    what is here
  sluice ls --sizes                            memory that common models take, and how many contexts fit beside them
  sluice doctor owner/name                     whether one fits on this machine
"""


@click.command(epilog=PULL_EPILOG)
@click.argument("model_id", metavar="OWNER/NAME[@REVISION]")
@click.option("--revision", metavar="REV", default=None, help="Branch, tag or commit. [main]")
@click.option("--to", metavar="DIR", default="", help="Put the files here. [the hub's cache, under HF_HOME]")
def pull(*, model_id: str, revision: str | None, to: str) -> int:
    """Fetch a model from the Hugging Face hub.

    Only what is served: configuration, tokenizer, chat template, safetensors; never pickles or code. What was broken
    off goes on. Prints the folder, which `sluice up` takes; it takes the id as well.
    """
    from cli.console import Console
    from cli.pull import run_pull

    click.echo(run_pull(model_id, revision, to, Console()))
    return 0


@click.command(epilog=LS_EPILOG)
@click.option("--sizes", is_flag=True, help="Common models instead: what they take, and what fits on cards.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def ls(*, sizes: bool, as_json: bool) -> int:
    """Show the models that are on this machine: the one that ships, and those in the hub's cache."""
    if sizes:
        from cli.model_table import run_sizes

        click.echo(run_sizes(as_json=as_json))
        return 0
    from cli.pull import run_ls

    click.echo(run_ls(as_json=as_json))
    return 0
