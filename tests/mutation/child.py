"""Runs seeds of the campaign with the fault that the environment names; exits with 1 at the first that notices it."""

from __future__ import annotations

import sys

import tests.mutation.loader  # noqa: F401  (first: it makes the fault)


def main() -> int:
    """Run the seeds of the command line."""
    from sim.faults.campaign import run_seed

    for seed in map(int, sys.argv[1:]):
        report = run_seed(seed)
        if report.violations:
            print(f"seed {seed}: {report.violations[0]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
