"""What which client can do with Sluice: `python -m tests.clients [--quick] [--record] [CLIENT …]`.

`make test-clients` makes the environments, and runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.clients.catalogue import CLIENTS, PROGRAMS, ROOT, ClientProgram
from tests.clients.programs.trying import KEY, PREFIX
from tests.clients.served import Served, proxy, serving
from tests.clients.table import render

PAGE: Final = ROOT / "docs" / "results" / "clients.md"
BEGIN: Final = "<!-- table: python -m tests.clients --record -->\n"
END: Final = "<!-- end -->\n"
LIMIT_S: Final = 240.0
_OURS: Final = ("PYTHON", "SLUICE_", "NATS_", "OPENAI_")


def run(client: ClientProgram, served: Served) -> dict[str, str]:
    """Return the outcome of each ability that a client offers.

    Raises:
        RuntimeError: its program ends with an error.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "PYTHONPATH": str(ROOT)}
    with ExitStack() as stack:
        base = stack.enter_context(proxy(served)) if client.by_proxy else f"{served.cluster}/v1"
        busy = "-" if client.by_proxy else f"{served.busy}/{client.name.replace(' ', '-')}/v1"
        argv = [*_program(client, stack), base, served.cluster, busy, KEY]
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    lines = [line.removeprefix(PREFIX) for line in done.stdout.splitlines() if line.startswith(PREFIX)]
    if done.returncode != 0:
        raise RuntimeError(f"{client.name} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return dict(map(json.loads, lines))


def _program(client: ClientProgram, stack: ExitStack) -> list[str | Path]:
    bin_folder = client.environment / "bin"
    if not client.program.endswith(".mjs"):
        return [bin_folder / "python", "-m", f"{PROGRAMS}.{client.program}"]
    # Node looks for libraries beside a program
    folder = Path(stack.enter_context(TemporaryDirectory()))
    for source in (ROOT / PROGRAMS.replace(".", "/")).glob("*.mjs"):
        (folder / source.name).write_bytes(source.read_bytes())
    (folder / "node_modules").symlink_to(client.environment / "node_modules")
    return [bin_folder / "node", folder / client.program]


def record(text: str) -> None:
    """Put a table into its page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


def outcomes_of(clients: Iterable[ClientProgram]) -> Iterator[tuple[ClientProgram, dict[str, str]]]:
    """Give each client with what it can do, beside one cluster."""
    with serving() as served:
        for client in clients:
            yield client, run(client, served)


def main() -> None:
    """Try the clients, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("clients", nargs="*", help="only those whose names have one of these words")
    parser.add_argument("--quick", action="store_true", help="only those that CI tries")
    parser.add_argument("--record", action="store_true", help=f"write the table to {PAGE.relative_to(ROOT)}")
    given = parser.parse_args()
    wanted = [
        client
        for client in CLIENTS
        if (client.is_quick or not given.quick)
        and (not given.clients or any(word in client.name for word in given.clients))
    ]
    if given.record and len(wanted) < len(CLIENTS):
        parser.error("only a whole table is recorded")
    found: dict[str, dict[str, str]] = {}
    for client, outcomes in outcomes_of(wanted):
        found[client.name] = outcomes
        num_yes = sum(outcome == "yes" for outcome in outcomes.values())
        print(f"{client.name}: {num_yes} of {len(outcomes)}", file=sys.stderr, flush=True)
    text = render(found, {client.name: client.version for client in wanted})
    print(text)
    if given.record:
        record(text)


if __name__ == "__main__":
    main()
