"""`sluice doctor`: whether this machine has what `sluice up` needs, and what runs here; a finding a line."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import click

from cli.exit_codes import DONE, FAILED
from shared.errors import SluiceError, StartupError
from shared.sizes import describe_bytes

if TYPE_CHECKING:
    from shared.model_sizes import CheckpointSizes

LEAST_BYTES: Final = 2**30
"""Of free memory: what a small model and the services take."""
LEAST_DISK_BYTES: Final = 512 * 2**20
"""Of the folder for temporary files, where a broker of our own has its store."""
LEAST_FILES: Final = 1024
EPILOG: Final = """\b
Examples:
  sluice doctor                                what is here, and what is missing
  sluice doctor owner/name                     whether a model fits here, with figures
  sluice doctor --json                         for a report of a bug

Ends with 1 if something is missing without which `sluice up` would not start.
"""


class Health(StrEnum):
    """Of one thing."""

    OK = "ok"
    POOR = "poor"
    """It goes without, not as well."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """About one thing."""

    what: str
    health: Health
    said: str
    hint: str = ""
    """The next step, unless all is well."""


def look_around(env: Mapping[str, str], model: str | None = None) -> list[Finding]:
    """Return what is found here; NATS_URL names a broker that is used instead of one of our own.

    Args:
        env: of the process.
        model: a folder, or an id on the hub; None: none is asked for.
    """
    looks: dict[str, Callable[[], Finding]] = {
        "python": lambda: _ok("python", f"{platform.python_version()} at {sys.executable}"),
        "torch": _torch,
        "kernels": _kernels,
        "device": _device,
        "memory": _memory,
        **({} if model is None else {"model": lambda: _model(model)}),
        "broker": lambda: _broker(env.get("NATS_URL", "")),
        "disk": _disk,
        "files": _files,
        "port": _port,
        "clusters": _clusters,
    }
    found = []
    for what, look in looks.items():
        try:
            found.append(look())
        except StartupError as error:
            found.append(Finding(what, Health.MISSING, error.message, error.hint))
        except (SluiceError, OSError) as error:
            found.append(Finding(what, Health.MISSING, str(error).removeprefix("sluice: ")))
    return found


def describe(found: list[Finding]) -> str:
    """Return a line for each finding, with the next step below those that have one."""
    width = max(len(each.what) for each in found)
    lines = []
    for each in found:
        lines.append(f"{each.health:<8} {each.what:<{width}}  {each.said}")
        lines += [f"{'':<8} {'':<{width}}  -> {each.hint}"] if each.hint else []
    return "\n".join(lines)


@click.command(epilog=EPILOG)
@click.argument("model", required=False)
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def doctor(*, model: str | None, as_json: bool) -> int:
    """Look whether this machine has what a cluster needs, and what runs here.

    With MODEL, a folder or an id on the Hugging Face hub, also whether that fits: of one that is not here yet only
    config.json is fetched, and the sizes of its files are asked for.
    """
    found = look_around(os.environ, model)
    click.echo(json.dumps([asdict(each) for each in found]) if as_json else describe(found))
    return FAILED if any(each.health is Health.MISSING for each in found) else DONE


def _ok(what: str, said: str) -> Finding:
    return Finding(what, Health.OK, said)


def _torch() -> Finding:
    try:
        return _ok("torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        hint = "Run `make install` in a checkout, or install sluice with its extra 'worker'"
        return Finding("torch", Health.MISSING, "workers compute with it, and it is not installed", hint)


def _kernels() -> Finding:
    from cli.cluster.children import has_cpu_kernels

    if has_cpu_kernels():
        return _ok("kernels", "the CPU kernels are compiled")
    hint = "Run `make install` where there is a C++ compiler"
    return Finding("kernels", Health.POOR, "no CPU kernels are compiled: torch's operators are slower", hint)


def _device() -> Finding:
    from shared.host import count_cores
    from shared.sizing import find_cards

    cards, cores = find_cards(), count_cores()
    cpu = f"{cores} core{'s' if cores > 1 else ''}"
    if not cards.count:
        return _ok("device", f"{cpu}, no card that torch can use")
    free = f", {describe_bytes(cards.free_bytes)} free" if cards.free_bytes else ""
    return _ok("device", f"{cards.count} CUDA device{'s' if cards.count > 1 else ''}{free}; {cpu}")


def _memory() -> Finding:
    from shared.host import free_memory

    free = free_memory()
    said = f"{describe_bytes(free)} are free"
    if free >= LEAST_BYTES:
        return _ok("memory", said)
    return Finding("memory", Health.POOR, said, "End what takes much, or use a small model and --memory")


def _model(text: str) -> Finding:
    from cli.cluster.cluster import choose_sizes
    from cli.cluster.settings import load_up_settings
    from shared.model_sizes import CPU_BYTES_PER_S, USUAL_CONTEXT

    sizes = _sizes(text)
    if not sizes.is_served or not sizes.num_parameters:
        lacks = "is of a kind that is not served" if not sizes.is_served else "has no weights as safetensors"
        return Finding(
            "model", Health.MISSING, f"{sizes.name} {lacks}", "`sluice ls --sizes` shows some that are served"
        )
    settings, _ = choose_sizes(load_up_settings({"model": text}), sizes)
    dtype, memory = settings.dtype, settings.memory or 0
    context = min(USUAL_CONTEXT, sizes.max_positions or USUAL_CONTEXT)
    num_tokens = sizes.kv_tokens(dtype, memory) if sizes.is_known else 0
    takes = describe_bytes(sizes.parameter_bytes(dtype))
    said = f"{sizes.name} takes {takes} in {dtype} on {settings.device}, of {describe_bytes(memory)} for a worker"
    said += f"; there is room for KV of about {num_tokens} tokens"
    if num_tokens < context:
        least = -(-sizes.least_bytes(dtype, context) // 2**20)
        hint = f"With --memory {least}MiB there is room for {context} tokens; or use a smaller one"
        return Finding("model", Health.POOR, said, hint)
    speed = CPU_BYTES_PER_S / sizes.parameter_bytes(dtype)
    pace = (
        f"; a reader gets {speed:.0f} tokens/s at most, where memory gives 50 GB/s" if settings.device == "cpu" else ""
    )
    return _ok("model", f"{said}, {num_tokens // context} contexts of {context} at a time{pace}")


def _sizes(text: str) -> CheckpointSizes:
    from cli.hub import MODEL_ID, find_cached, parse_source, peek
    from cli.model import find_model
    from cli.model_table import sizes_of_common
    from shared.model_sizes import read_sizes, sizes_of
    from sim.catalog.facts import models

    common = models().get(text)
    if common is not None and not Path(text).exists():
        return sizes_of_common(text, common)
    is_id = MODEL_ID.match(text) and not Path(text).exists()
    source = parse_source(text) if is_id else None
    if source is None or find_cached(source) is not None:
        model = find_model(text)
        return replace(read_sizes(model.folder), name=model.name)
    config, num_bytes = peek(source)
    return sizes_of(str(source), config, num_bytes)


def _broker(nats_url: str) -> Finding:
    from cli.cluster.checks import check_broker
    from shared.transport.nats_server import find_binary

    if nats_url:
        check_broker(nats_url)
        return _ok("broker", f"NATS_URL names {urlsplit(nats_url.split(',')[0]).hostname}, which answers")
    return _ok("broker", f"{find_binary()} is started with a cluster")


def _disk() -> Finding:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    said = f"{describe_bytes(free)} are free in {folder}"
    if free >= LEAST_DISK_BYTES:
        return _ok("disk", said)
    return Finding("disk", Health.POOR, said, "Free some, or set TMPDIR to where there is more")


def _files() -> Finding:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"{most} files may be open"
    if most == resource.RLIM_INFINITY or most >= LEAST_FILES:
        return _ok("files", "any number may be open" if most == resource.RLIM_INFINITY else said)
    return Finding("files", Health.POOR, said, f"Start it where `ulimit -n` says {LEAST_FILES} or more")


def _port() -> Finding:
    from cli.cluster.checks import find_port
    from cli.run_file import DEFAULT_URL, find_runs

    parts = urlsplit(DEFAULT_URL)
    host, port = parts.hostname or "", parts.port or 0
    if any(urlsplit(run.url).port == port for run in find_runs()):
        return _ok("port", f"{port} is that of a cluster that runs here")
    try:
        find_port(host, port)
    except StartupError as error:
        return Finding("port", Health.POOR, error.message, error.hint)
    return _ok("port", f"{port} is free")


def _clusters() -> Finding:
    from cli.runs import run_ps

    told = json.loads(asyncio.run(run_ps(as_json=True)))
    if not told:
        return _ok("clusters", "none runs here")
    said = "; ".join(f"{each['id']} at {each['url']} is {each['state']}" for each in told)
    poor = next((each["id"] for each in told if each["state"] != "ready"), None)
    if poor is None:
        return _ok("clusters", said)
    return Finding("clusters", Health.POOR, said, f"`sluice logs --cluster {poor}` tells more")
