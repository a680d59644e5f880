"""`make mutation`: makes a seeded sample of small faults, one at a time, and counts those that the tests notice.

Each fault meets the seeds of the campaign first (`sim/faults/campaign.py`); what survives them meets the quick suites
of its module. The result is a table in Markdown; whether a survivor changes any behaviour is for people to say.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.loader import VARIABLE, mutants_of
from tests.mutation.operators import Mutant

ROOT = Path(__file__).parents[2]
CPU_LIMIT_S = 240
"""Processor seconds for all seeds, or all suites, of one fault; more is a fault that was noticed: it does not end. They
take a minute at most, so a machine that is busy with other things makes no difference."""
WALL_LIMIT_S = 1800.0
"""For what waits without computing."""
SAME_PROGRAM = "any_process"
"""Part of the names of tests that compare with a process of their own: it would have no fault."""

SEEDS = tuple(f"tests/sim/test_faults.py::test_the_invariants_hold_whatever_fails[{seed}]" for seed in range(20))
"""Twenty seeds of the campaign."""
_BLOCKS = (
    "tests/unit/worker/engine/test_engine_blocks.py",
    "tests/unit/worker/engine/test_engine_prefix.py",
    "tests/unit/worker/engine/test_engine_compaction.py",
    "tests/sim/test_engine_properties.py",
)
_SESSION = (
    "tests/unit/dispatcher/test_dispatcher_session.py",
    "tests/unit/dispatcher/test_dispatcher_sessions.py",
    "tests/unit/dispatcher/test_dispatcher_recovery.py",
    "tests/unit/dispatcher/test_dispatcher_forks.py",
)
_WORKER = (
    "tests/sim/test_worker_service.py",
    "tests/unit/worker/serving/test_worker_emitter.py",
    "tests/sim/test_worker_leases.py",
    "tests/sim/test_worker_sampling.py",
)
SUITES = {
    "services.worker.blocks.manager": _BLOCKS,
    "services.worker.blocks.block_pool": _BLOCKS,
    "services.worker.blocks.compaction": _BLOCKS,
    "services.worker.blocks.free_blocks": _BLOCKS,
    "services.worker.blocks.limit": _BLOCKS,
    "services.worker.serving.intake": _WORKER,
    "services.worker.serving.emitter": _WORKER,
    "services.dispatcher.session.session": _SESSION,
}
"""The modules that get faults, and the suites that are theirs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one fault."""

    module: str
    mutant: Mutant
    noticed_by: str
    """`seeds`, `suites`, or empty: it survived."""
    how: str


def choose(count: int, seed: int) -> list[tuple[str, int]]:
    """Return a sample of all faults of all modules, each once; a run that is cut short has met a fair part of it."""
    every = [(module, number) for module in SUITES for number in range(len(mutants_of(module)[1]))]
    return random.Random(seed).sample(every, min(count, len(every)))


def judge(module: str, number: int) -> Verdict:
    """Let the tests meet one fault."""
    mutant = mutants_of(module)[1][number]
    environment = {**os.environ, VARIABLE: f"{module}:{number}", "PYTHONHASHSEED": "0"}
    for name, tests in (("seeds", SEEDS), ("suites", SUITES[module])):
        how = _run(tests, environment)
        if how is not None:
            return Verdict(module, mutant, name, how)
    return Verdict(module, mutant, "", "")


def _run(tests: Sequence[str], environment: dict[str, str]) -> str | None:
    """Return how the fault was noticed, or None if it was not."""
    limited = ["/bin/sh", "-c", f'ulimit -t {CPU_LIMIT_S}; exec "$@"', "sh", sys.executable, "-m", "pytest", "-x", "-q"]
    limited += ["-p", "tests.mutation.loader", "-p", "no:cacheprovider", "-k", f"not {SAME_PROGRAM}"]
    limited += ["--timeout", str(WALL_LIMIT_S), *tests]
    try:
        done = subprocess.run(
            limited, cwd=ROOT, env=environment, timeout=WALL_LIMIT_S, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return "does not end"
    if not done.returncode:
        return None
    if done.returncode < 0:
        return "does not end"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return (failed or lines or ["no word"])[-1][:160]


def report(verdicts: list[Verdict], seconds: float) -> str:
    """Return the result as Markdown."""
    lines = ["| module | faults | noticed by seeds | by suites | survived |", "|---|---|---|---|---|"]
    for module in SUITES:
        of_module = [verdict for verdict in verdicts if verdict.module == module]
        by = Counter(verdict.noticed_by for verdict in of_module)
        lines.append(f"| `{module}` | {len(of_module)} | {by['seeds']} | {by['suites']} | {by['']} |")
    by = Counter(verdict.noticed_by for verdict in verdicts)
    lines.append(f"| all | {len(verdicts)} | {by['seeds']} | {by['suites']} | {by['']} |")
    ratio = 1 - by[""] / len(verdicts)
    lines += ["", f"{ratio:.1%} of {len(verdicts)} noticed, in {seconds / 60:.0f} minutes. Survivors:", ""]
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.module, verdict.mutant.line)):
        if not verdict.noticed_by:
            lines.append(f"- `{verdict.module}` line {verdict.mutant.line}, {verdict.mutant.what}")
    return "\n".join(lines)


def main() -> int:
    """Run the sample; return 1 if fewer than the wanted share were noticed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description="Faults that the tests should notice."
    )
    parser.add_argument("--count", type=int, default=200, help="faults to make (default 200)")
    parser.add_argument("--seed", type=int, default=4, help="chooses them (default 4)")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time (default 2)")
    parser.add_argument("--least", type=float, default=0.8, help="share that must be noticed (default 0.8)")
    arguments = parser.parse_args()
    begun_s = time.monotonic()
    chosen = choose(arguments.count, arguments.seed)
    verdicts: list[Verdict] = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for verdict in pool.map(lambda each: judge(*each), chosen):
            verdicts.append(verdict)
            state = f"noticed by {verdict.noticed_by}: {verdict.how}" if verdict.noticed_by else "SURVIVED"
            where = f"{verdict.module}:{verdict.mutant.line} {verdict.mutant.what}"
            print(f"{len(verdicts):4}/{len(chosen)}  {where}  {state}", file=sys.stderr, flush=True)
    print(report(verdicts, time.monotonic() - begun_s))
    num_survived = sum(not verdict.noticed_by for verdict in verdicts)
    return int(num_survived > (1 - arguments.least) * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
