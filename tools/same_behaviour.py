"""Whether two commits behave the same in the simulator, to the last byte.

    python -m tools.same_behaviour BEFORE [AFTER] --traces DIR [--quick] [--processes 2]

Every system runs a burst and a window of KunServe's under three seeds, and clusters live through seeds of faults. The
same runs happen at both commits, each by its own code, in a worktree of its own; AFTER is the working tree as it is
unless it is named. Compared are all figures of `sluice compare` but its settings, what the services log, and the
traces of the faults, in which the digest stands for every byte that passed the broker. What a commit gave is kept in
the folder of `--cache`.

The exit code is 0 if nothing differs and everything of `EVENTS` happened: equal runs without it would prove too little.
1 if not: the first difference is named. 2: there is nothing to compare.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import inspect
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import structlog

Tree = Any
"""Mappings, lists, texts and numbers, as JSON has them."""
SAME, DIFFERENT, NOTHING = 0, 1, 2
WORKING_TREE: Final = "the working tree"
_ABSENT: Final = object()
EVENTS: Final = {
    "form": r"role_changed .*group=\S+ stage=0 ",
    "exchange, coordinated": r"kv_exchange_ended .*num_moved_bytes=[1-9].*mode=coordinated",
    "exchange, live": r"kv_exchange_ended .*num_moved_bytes=[1-9].*mode=live",
    "load": r"parameters_beside .*layers=(\[\d+, \d+\)) .*stage=0 .*resident=(?!\1)",
    "unload": r"parameters_beside .*layers=(\[\d+, \d+\)) .*stage=0 .*resident=\1",
    "copy ahead": r"kv_copied .*num_blocks=[1-9]",
    "restore": r"role_changed .*group= stage=0 ",
    "rebalance": r"requests_moved ",
}
"""What must have happened, by the lines of log and traces that say so."""
_SYSTEMS: Final = (
    "fcfs,fcfs-chunked,migrate,load-balance,best-fit,worst-fit,gradient,pack,mell,mell-printed,"
    "fcfs-pp,round-robin,swap,andes,lqsf,sluice,tokenflow,"
    "bros,bros-whole,bros-recompute,bros-rr,andes-unlimited,"
    "kunserve,kunserve-v1,kunserve-v2,kunserve-sluice,oracle"
)
_DEMO: Final = ("--scenario", "burst-demo", "--duration", "110")
_WINDOW: Final = ("--scenario", "kunserve-v2-restore", "--upscale", "15", "--duration", "75")
"""The load is so high that the first burst makes groups form, which are whole again in the minute that follows."""
_SEEDS: Final = ("--seed", "0", "--seed", "1", "--seed", "2")


@dataclass(frozen=True, slots=True)
class Run:
    """What is done at both commits, in a process of its own."""

    name: str
    task: str
    """Key of `TASKS`."""
    arguments: tuple[str, ...]


FULL: Final = (
    Run("kunserve window", "compare", (*_WINDOW, "--systems", _SYSTEMS, *_SEEDS)),
    Run("burst-demo", "compare", (*_DEMO, "--systems", _SYSTEMS, *_SEEDS)),
    Run("faults", "faults", ("plain:0:25", "groups:0:40", "live:0:25")),
)
"""The longest one first."""
QUICK: Final = (
    Run("kunserve window", "compare", (*_WINDOW, "--systems", "kunserve")),
    Run("burst-demo", "compare", (*_DEMO, "--systems", "kunserve,kunserve-v2")),
    Run("faults", "faults", ("plain:0:2", "groups:0:3", "groups:36:1", "live:0:4")),
)


# Within a checkout: nothing here but names that tests and users of the simulator know


def compare_systems(arguments: Sequence[str]) -> Tree:
    """Return the figures of `sluice compare` with these arguments, and what services logged meanwhile."""
    lines: list[str] = []
    configure, level = structlog.configure, structlog.make_filtering_bound_logger(logging.INFO)

    def hear(_logger: Any, method: str, fields: MutableMapping[str, Any]) -> str:
        if "rid" not in fields:  # of single requests the figures tell
            lines.append(_line(method, fields))
        raise structlog.DropEvent

    def hear_all(**settings: Any) -> None:
        configure(**{**settings, "processors": [hear], "wrapper_class": level})

    with patch.object(structlog, "configure", hear_all), tempfile.TemporaryDirectory() as folder:
        from cli.main import run_command

        file = Path(folder, "comparison.json")
        with contextlib.redirect_stdout(sys.stderr):
            code = run_command(["compare", *arguments, "--jobs", "1", "--quiet", "--json", str(file)])
        assert code == 0, f"sluice compare ended with {code}"
        found = json.loads(file.read_text(encoding="utf-8"))
    per_seed = found.pop("per_seed", {})  # first, so that a difference is named by its seed
    del found["scenario"]
    return {"per_seed": per_seed, **found, "log": lines}


def live_through_faults(arguments: Sequence[str]) -> Tree:
    """Return the traces of seeds of faults, which are given as `kind:first:count`.

    The kind is `plain`, `groups` (groups come and go) or `live` (their KV is attended where it lies, and moves slowly).
    """
    from shared.systems import KvExchange
    from sim.faults.campaign import run_scenario
    from sim.faults.scenario import draw_group_scenario, draw_scenario

    traces = {}
    for kind, first, count in (text.split(":") for text in arguments):
        for seed in range(int(first), int(first) + int(count)):
            scenario = draw_scenario(seed) if kind == "plain" else draw_group_scenario(seed)
            if kind == "live":
                slow = min(scenario.link_bytes_per_s, 2e4)
                scenario = replace(scenario, kv_exchange=KvExchange.LIVE, link_bytes_per_s=slow)
            lines: list[str] = []
            report = run_scenario(scenario, lines.append)
            ends = {
                "violations": list(report.violations),
                "coverage": sorted(report.coverage.items()),
                "virtual seconds": report.virtual_s,
                "digest": report.digest,
            }
            traces[f"{kind} seed {seed}"] = [*lines, *(f"{name}: {value}" for name, value in ends.items())]
    return traces


TASKS: Final[Mapping[str, Callable[[Sequence[str]], Tree]]] = {
    "compare": compare_systems,
    "faults": live_through_faults,
}


def _line(method: str, fields: Mapping[str, Any]) -> str:
    rest = " ".join(f"{key}={value}" for key, value in fields.items() if key != "event")
    return f"{method} {fields['event']}  {rest}"


def _run_here(file: Path, task: str, arguments: Sequence[str]) -> None:
    found = {"outcome": TASKS[task](arguments), "cpu_s": time.process_time()}
    file.write_text(json.dumps(found), encoding="utf-8")


# Between commits


class RunFailedError(Exception):
    """A commit could not be run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave at one commit."""

    tree: Tree
    cpu_s: float
    """That it took when it ran."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs commits.

    Args:
        repository: its top folder.
        cache: folder in which outcomes of commits are kept.
        traces: folder of the traces that scenarios name.
        num_processes: most at a time.
    """

    repository: Path
    cache: Path
    traces: Path
    num_processes: int

    def outcomes(self, commit: str | None, runs: Sequence[Run]) -> list[Outcome]:
        """Return what each run gives at a commit, in their order.

        Args:
            commit: its whole id; None: the working tree as it is.
            runs: what is done.

        Raises:
            RunFailedError: one of them failed.
        """
        if commit is None:
            return self._run_all(self.repository, runs)
        files = [self._file(commit, run) for run in runs]
        if missing := [run for run, file in zip(runs, files, strict=True) if not file.exists()]:
            with self._checkout(commit) as folder:
                for run, outcome in zip(missing, self._run_all(folder, missing), strict=True):
                    _write(self._file(commit, run), outcome)
        return [Outcome(*json.loads(gzip.decompress(file.read_bytes()))) for file in files]

    def _file(self, commit: str, run: Run) -> Path:
        """Return where an outcome is kept: under what gave it, and how."""
        how = f"{run} {inspect.getsource(TASKS[run.task])} {inspect.getsource(_line)}"
        return self.cache / f"{commit}-{hashlib.sha256(how.encode()).hexdigest()[:16]}.json.gz"

    @contextlib.contextmanager
    def _checkout(self, commit: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="same-behaviour-") as parent:
            folder = Path(parent, commit[:12])
            _git(self.repository, "worktree", "add", "--quiet", "--detach", str(folder), commit)
            try:
                yield folder
            finally:
                _git(self.repository, "worktree", "remove", "--force", str(folder))

    def _run_all(self, folder: Path, runs: Sequence[Run]) -> list[Outcome]:
        with ThreadPoolExecutor(self.num_processes) as pool:
            return list(pool.map(lambda run: self._run(folder, run), runs))

    def _run(self, folder: Path, run: Run) -> Outcome:
        """Run this file as a script whose imports come from a checkout."""
        paths = os.pathsep.join([str(folder), str(folder / "client")])
        arguments = [*run.arguments, "--traces", str(self.traces)] if run.task == "compare" else run.arguments
        with tempfile.TemporaryDirectory() as parent:
            file = Path(parent, "outcome.json")
            command = [sys.executable, "-P", str(Path(__file__).absolute()), "--here", str(file), run.task, *arguments]
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": paths},
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RunFailedError(f"{run.name} failed in {folder}:\n{done.stderr[-4000:]}")
            found = json.loads(file.read_text(encoding="utf-8"))
        return Outcome(found["outcome"], found["cpu_s"])


def _write(file: Path, outcome: Outcome) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(gzip.compress(json.dumps([outcome.tree, outcome.cpu_s]).encode()))
    part.replace(file)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailedError(done.stderr.strip())
    return done.stdout.strip()


# What came of it. Pure.


def first_difference(before: Tree, after: Tree, path: tuple[str, ...] = ()) -> str | None:
    """Say where two trees differ first, in the order of the first one; None if they are the same, byte by byte."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        names = [*before, *(name for name in after if name not in before)]
        parts = [(name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in names]
    elif isinstance(before, list) and isinstance(after, list):
        pairs = zip_longest(before, after, fillvalue=_ABSENT)
        parts = [(f"line {number}", *pair) for number, pair in enumerate(pairs, 1)]
    else:
        parts = []
    for name, one, other in parts:
        if (found := first_difference(one, other, (*path, name))) is not None:
            return found
    texts = ["nothing" if each is _ABSENT else json.dumps(each, ensure_ascii=False) for each in (before, after)]
    return f"{' › '.join(path)}\n  before: {texts[0]}\n  after:  {texts[1]}" if texts[0] != texts[1] else None


def count_events(tree: Tree) -> Counter[str]:
    """Return how often each of `EVENTS` stands in the lines of a tree."""
    if isinstance(tree, str):
        return Counter(name for name, pattern in EVENTS.items() if re.search(pattern, tree))
    parts = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list) else ()
    return sum(map(count_events, parts), Counter())


def troubles(before: Mapping[str, Tree], after: Mapping[str, Tree]) -> list[str]:
    """Return why two commits, of which these are the trees by run, cannot be said to behave the same."""
    differences = (first_difference(before[name], after[name], (name,)) for name in before)
    found = [f"first difference: {difference}" for difference in differences if difference is not None]
    for when, trees in (("before", before), ("after", after)):
        counts = count_events({**trees})
        found += [f"never happened {when}: {name}; that proves too little" for name in EVENTS if not counts[name]]
    return found


def render(before: Mapping[str, Outcome], after: Mapping[str, Outcome]) -> str:
    """Return what each run took and what happened in it, before and after, as a table for people."""
    rows = [("", list(before)), ("CPU s", [f"{before[name].cpu_s:.0f}, {after[name].cpu_s:.0f}" for name in before])]
    counts = {name: [count_events(each[name].tree) for each in (before, after)] for name in before}
    for event in EVENTS:
        rows.append((event, [f"{old[event]}, {new[event]}" for old, new in counts.values()]))
    return "\n".join(f"{title:<24}" + "".join(f"{cell:>18}" for cell in cells) for title, cells in rows)


def main(argv: Sequence[str]) -> int:
    """Compare two commits as the command line says, and return the exit code."""
    if argv[:1] == ["--here"]:
        _run_here(Path(argv[1]), argv[2], argv[3:])
        return SAME
    given = _parser().parse_args(argv)
    runs = QUICK if given.quick else FULL
    try:
        repository = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        bench = Bench(repository, given.cache, given.traces.absolute(), given.processes)
        found = []
        for name in (given.before, given.after):
            commit = None if name is None else _git(repository, "rev-parse", "--verify", f"{name}^{{commit}}")
            outcomes = bench.outcomes(commit, runs)
            found.append({run.name: outcome for run, outcome in zip(runs, outcomes, strict=True)})
    except RunFailedError as error:
        print(error, file=sys.stderr)
        return NOTHING
    print(render(*found))
    wrong = troubles(*({name: outcome.tree for name, outcome in each.items()} for each in found))
    title = f"{given.before} and {given.after or WORKING_TREE}"
    print("\n".join(wrong) if wrong else f"{title} behave the same")
    return DIFFERENT if wrong else SAME


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.same_behaviour", description=__doc__.partition("\n")[0])
    parser.add_argument("before", help="commit to compare with")
    parser.add_argument("after", nargs="?", help=f"commit to compare; {WORKING_TREE} unless it is named")
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces that scenarios name")
    parser.add_argument(
        "--quick", action="store_true", help="about a minute: KunServe's systems, one seed, ten of faults"
    )
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default 1)")
    folder = Path(tempfile.gettempdir(), "same_behaviour")
    parser.add_argument("--cache", type=Path, default=folder, help="keeps what commits gave (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
