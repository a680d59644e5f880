"""From a clone to the first answer, how long every command takes to print its help, and what `sluice top` costs.

    python -m benchmarks.first_day install [--into DIR]     a clone, `make demo` with an empty cache: bytes and seconds
    python -m benchmarks.first_day help [--rounds 5]        `--help` of every command, in turns with an empty Python
    python -m benchmarks.first_day top [--seconds 30]       processor time of `sluice top`: idle, and under load

*install* clones this repository's newest commit. Bytes are those of the packages that pip fetched, by its own log, also
where it took one from a folder of this machine. *help* reads as a ratio to a Python that does nothing, the median of
pairs. *top* draws on a pseudo-terminal of 80x24, one frame a second, and counts its own process after five frames.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from benchmarks.harness import ROOT, cpu_s, machine, print_table

MB: Final = 1e6
SLUICE: Final = (sys.executable, "-m", "cli.main")
FIRST_WORDS: Final = "\nsluice-demo: "
"""After them comes the answer."""
DOWNLOADED: Final = r"Downloading (\S+) \(([\d.]+) ([kMG]?B)\)"
UNITS: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
"""Of pip's log."""
SETTLE_S: Final = 5.0
"""What `sluice top` takes to start is not counted."""


def install(into: Path) -> None:
    """Print when and after how many bytes a clone of this repository shows the first words of an answer."""
    begun_s = time.monotonic()
    clone = into / "sluice"
    subprocess.run(["git", "clone", "--quiet", f"file://{ROOT}", clone], check=True)
    cloned_s = time.monotonic() - begun_s
    log = into / "pip.log"
    env = {**os.environ, "PIP_NO_CACHE_DIR": "1", "PIP_LOG": str(log)}
    marks: dict[str, float] = {}
    with subprocess.Popen(
        ["make", "demo"], cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as demo:
        _note_marks(demo, marks, begun_s)
    if demo.returncode:
        raise SystemExit(f"make demo ended with {demo.returncode}")
    num_bytes = _fetched_bytes(log.read_text())
    rows = [
        ("cloned", f"{cloned_s:.1f}", f"{_size(clone / '.git') / MB:.1f}"),
        ("installed, cluster starts", f"{marks['starts']:.1f}", f"{num_bytes / MB:.1f}"),
        ("first words of the answer", f"{marks['answers']:.1f}", "0.0"),
    ]
    print_table("From a clone to the first answer", ("", "s since the start", "MB fetched"), rows)
    print(f"on disk: {_size(clone / '.venv') / MB:.0f} MB in .venv, {_size(clone) / MB:.0f} MB in all")


def _fetched_bytes(log: str) -> float:
    fetched = {name: float(size) * UNITS[unit] for name, size, unit in re.findall(DOWNLOADED, log)}
    taken = set(re.findall(r"Processing (/\S+\.whl)", log))
    return sum(fetched.values()) + sum(Path(path).stat().st_size for path in taken)


def _note_marks(demo: subprocess.Popen[bytes], marks: dict[str, float], begun_s: float) -> None:
    assert demo.stdout is not None
    text = ""
    while chunk := os.read(demo.stdout.fileno(), 1 << 16):
        text += chunk.decode(errors="replace")
        now_s = time.monotonic() - begun_s
        if "starting " in text:
            marks.setdefault("starts", now_s)
        if text.rpartition(FIRST_WORDS)[2].strip() and FIRST_WORDS in text:
            marks.setdefault("answers", now_s)


def _size(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def help_times(num_rounds: int) -> None:
    """Print how long `--help` of each command takes, and that as a multiple of an empty Python beside it."""
    names = [(), *_commands()]
    nothing: list[float] = []
    times: dict[tuple[str, ...], list[float]] = {name: [] for name in names}
    for _ in range(num_rounds):
        for name in names:
            nothing.append(_seconds((sys.executable, "-c", "pass")))
            times[name].append(_seconds((*SLUICE, *name, "--help")))
    empty_s = statistics.median(nothing)
    rows = []
    for name, each in times.items():
        median_s = statistics.median(each)
        rows.append((" ".join(("sluice", *name)), f"{median_s * 1e3:.0f}", f"{median_s / empty_s:.1f}"))
    print_table("Help", ("--help of", "ms", "of an empty Python's"), rows)
    print(f"an empty Python: {empty_s * 1e3:.0f} ms; median of {num_rounds}")


def _commands(parent: click.Command | None = None, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    from cli.main import cli

    group = parent or cli
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        yield (*prefix, name)
        if isinstance(command, click.Group):
            yield from _commands(command, (*prefix, name))


def _seconds(command: Sequence[str]) -> float:
    begun_s = time.perf_counter()
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begun_s


def top(seconds: float) -> None:
    """Print the processor time of `sluice top`, as a share of a core, beside a cluster with and without work."""
    with _cluster() as url:
        rows = [("idle", f"{_top_share(url, seconds):.2%}")]
        load = subprocess.Popen(
            [*SLUICE, "bench", "--url", url, "--request-rate", "4", "--num-prompts", str(int(4 * (seconds + 30)))],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            rows.append(("4 requests/s", f"{_top_share(url, seconds):.2%}"))
        finally:
            load.send_signal(signal.SIGINT)
            load.wait()
    print_table("Processor time", ("sluice top beside", "of a core"), rows)


@contextmanager
def _cluster() -> Iterator[str]:
    """Run `sluice up` with the model that ships and two workers; gives the API's URL."""
    command = [*SLUICE, "up", "--workers", "2", "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGINT)


def _top_share(url: str, seconds: float) -> float:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [*SLUICE, "top", "--url", url]
    process = subprocess.Popen(command, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    time.sleep(SETTLE_S)
    begun_s, used_s = time.monotonic(), cpu_s(process.pid)
    time.sleep(seconds)
    share = (cpu_s(process.pid) - used_s) / (time.monotonic() - begun_s)
    os.write(ours, b"q")
    if process.wait(10):
        raise SystemExit(f"sluice top ended with {process.returncode}")
    return share


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:
        pass  # the other side is closed


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("install", "help", "top"))
    parser.add_argument("--into", type=Path, help="an empty folder for the clone; else a temporary one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    print(machine())
    if given.part == "help":
        help_times(given.rounds)
    elif given.part == "top":
        top(given.seconds)
    elif given.into is not None:
        install(given.into.resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            install(Path(folder))


if __name__ == "__main__":
    main()
