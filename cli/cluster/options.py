"""The commands that start a cluster here, as the command line knows them: `sluice up`, `run` and `demo`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from cli.chat_options import pacing_of, pacing_options, talk_of, talk_options

F = TypeVar("F", bound=Callable[..., Any])

UP_EPILOG = """\b
Examples:
  sluice up -d                                 return once it is ready; sluice down stops it
  sluice up --port 0 --json                    for scripts: one line of JSON once ready
  sluice up --memory 4GiB --dtype bfloat16     a larger budget, half the bytes per value
  NATS_URL=nats://broker:4222 sluice up        use a broker that runs already

Ctrl-C finishes running answers (up to --drain-limit-s) and stops; a second Ctrl-C stops at once.
"""

RUN_EPILOG = """\b
Examples:
  sluice run                                   the model that ships
  sluice run ./llama                           a folder
  sluice run owner/name --device cuda          fetched from the hub if it is not here
  sluice run ./llama "Tell me a story"         one answer
  echo "Tell me a story" | sluice run --pace off

Ctrl-C stops an answer, the conversation stays; Ctrl-D leaves. From a pipe, each line is one message.
A cluster that runs already and serves the model is talked with, and goes on afterwards.
"""

# name, metavar, help; the meaning and the check of each value are in cli.cluster.settings
_CLUSTER_OPTIONS = (
    ("model", "DIR|ID", "Checkpoint folder in Hugging Face format, or an id there. [the model that ships]"),
    ("served-model-name", "NAME,…", "Names under which it is served. [the id, or the folder's name]"),
    ("generation-config", "auto|none", "Default sampling from the model's generation_config.json, or none. [auto]"),
    (
        "reasoning-parser",
        "KIND",
        "How thinking is told apart: auto, none, qwen3 or deepseek_r1. [auto: by the template]",
    ),
    (
        "tool-parser",
        "KIND",
        "How calls of tools are found: auto, none, hermes, llama3, mistral or phi. [auto: by the template]",
    ),
    ("workers", "N", "Worker processes, each with a whole copy of the model. [up: 1, demo: 2]"),
    ("device", "cpu|cuda", "Where the workers run: cpu, cuda, cuda:<index> or auto. [auto: a card if there is one]"),
    ("dtype", "auto|float32|bfloat16", "Type of parameters and KV. [auto: bfloat16 on a card, or to fit]"),
    ("memory", "SIZE", "Hard budget of each worker, e.g. 512MiB, 4GiB: parameters, KV, workspace. [auto]"),
    ("host-memory", "SIZE", "Of the host, beside it, for KV that gives way; 0: none. [a share of what is free]"),
    ("system", "NAME", "Named set of policies. [sluice]"),
    ("host", "ADDR", "Address to listen on. [127.0.0.1]"),
    ("api-keys-file", "FILE", "Keys that requests need (`sluice keys create`). [none: no key is asked for]"),
    ("api-key", "KEY", "One key, of 16 characters at least; better as SLUICE_API_KEY than as a flag. [none]"),
    ("port", "P", "Port of the API; 0 picks a free one. [up: 8000, demo: 0]"),
    ("allow-host", "NAME,…", "Names by which the API may be asked without keys. [--host, addresses, localhost]"),
    ("allow-origin", "URL,…", "Whose pages may use the API from a browser: https://chat.example. [nobody's]"),
    ("max-model-len", "N", "Most tokens of one request. [what the model and the memory allow]"),
    ("threads", "N", "CPU threads of each worker. [cores / workers]"),
    ("kernels", "KIND", "What computes the steps: auto, native, flashinfer or torch. [auto]"),
    ("cluster", "NAME", "Name of the cluster on a shared broker. [default]"),
    ("nats-url", "URL", "Broker to use. [NATS_URL, else one is started]"),
    ("log-dir", "DIR", "Keep the logs of every process here. [a temporary folder]"),
    ("log-level", "LEVEL", "debug, info, warning or error. [info]"),
    ("costs-kept", "DIR", "Where workers keep what their steps have cost. [~/.cache/sluice/costs]"),
    ("start-limit-s", "S", "Seconds that loading may take. [1800]"),
    ("drain-limit-s", "S", "Seconds that running answers get at the end. [120]"),
)
_CLUSTER_SWITCHES = (
    ("prefix-caching", "Keep KV until its memory is needed, for requests that begin alike. [on]"),
    ("graphs", "Record steps of decodes as CUDA graphs, where FlashInfer computes attention. [on]"),
    ("fused", "On CUDA compute norms, rotary embeddings, gates and samples by Triton's kernels. [on]"),
    ("overlap", "Launch steps of decodes before those before them have ended. [on a GPU]"),
    ("deterministic", "The same text whatever else is in the batch; somewhat slower."),
    ("verbose", "Show every warning of its processes, and snippets to paste."),
    ("allow-no-key", "Listen on another address than this machine's own although the API asks for no key."),
)


def cluster_options(command: F) -> F:
    """Add the options of `up` and `demo`; one that is not given arrives as None."""
    for name, text in reversed(_CLUSTER_SWITCHES):
        command = click.option(f"--{name}/--no-{name}", default=None, help=text)(command)
    for name, metavar, text in reversed(_CLUSTER_OPTIONS):
        command = click.option(f"--{name}", metavar=metavar, default=None, help=text)(command)
    return command


def _with_model(flags: dict[str, Any], model: str | None) -> dict[str, Any]:
    """Return the flags with the model that was named without one."""
    if model is not None and flags["model"] is not None:
        raise click.UsageError("the model is named twice")
    return flags if model is None else {**flags, "model": model}


@click.command(epilog=UP_EPILOG)
@click.argument("named_model", metavar="[MODEL]", required=False)
@cluster_options
@click.option("--json", "as_json", is_flag=True, help='One line {"url", "nats_url", "pids"} on stdout once ready.')
@click.option("-d", "--detach", is_flag=True, help="Return once it is ready; `sluice down` stops it.")
@click.option("--in-background", is_flag=True, hidden=True)
def up(*, named_model: str | None, as_json: bool, detach: bool, in_background: bool, **flags: Any) -> int:
    """Serve a model on this machine: broker, monitor, planner, workers, dispatcher."""
    from cli.cluster.settings import load_up_settings
    from cli.console import Console

    flags = _with_model(flags, named_model)
    settings = load_up_settings(flags)
    if detach:
        from cli.cluster.background import run_in_background

        return run_in_background(flags, Console(), as_json=as_json)
    from cli.cluster.up import run_up

    return asyncio.run(run_up(settings, Console(), as_json=as_json or in_background, leaves=in_background))


@click.command(epilog=RUN_EPILOG)
@click.argument("named_model", metavar="[MODEL]", required=False)
@click.argument("question", required=False)
@cluster_options
@talk_options
def run(*, named_model: str | None, question: str | None, **flags: Any) -> int:
    """Talk with a model: the cluster that serves it here, or one that is started for as long as that takes."""
    from cli.cluster.settings import load_up_settings
    from cli.console import Console
    from cli.run import run_model

    talk, flags = talk_of(flags), _with_model(flags, named_model)
    return run_model(load_up_settings(flags), flags, Console(), talk, question)


@click.command()
@cluster_options
@pacing_options("reading")
@click.option("--prompt", metavar="TEXT", default=None, help="The question. [a story]")
@click.option("--burst", is_flag=True, help="Send many readers: layers are dropped for their KV, and come back.")
def demo(*, prompt: str | None, burst: bool, **flags: Any) -> int:
    """Start a cluster and stream one answer through it, or a burst of readers.

    In a terminal the cluster then stays up until Ctrl-C; otherwise, and after a burst, the command ends. A burst takes
    two minutes, shows what happens as it happens, and ends with 1 if no layers were dropped.
    """
    from cli.cluster.burst import DEFAULTS as BURST_DEFAULTS
    from cli.cluster.burst import run_burst
    from cli.cluster.demo import DEFAULTS, run_demo
    from cli.cluster.hints import EXAMPLE_PROMPT
    from cli.cluster.settings import load_up_settings
    from cli.console import Console

    pacing, prompt = pacing_of(flags), prompt or EXAMPLE_PROMPT
    if burst:
        return asyncio.run(run_burst(load_up_settings(flags, BURST_DEFAULTS), Console(), prompt, pacing))
    settings, is_interactive = load_up_settings(flags, DEFAULTS), sys.stdin.isatty() and sys.stdout.isatty()
    return asyncio.run(run_demo(settings, Console(), prompt, pacing, is_interactive=is_interactive))
