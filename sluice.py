"""The command `sluice` as it is installed: our own packages come first, whatever PYTHONPATH says.

`cli`, `services`, `shared` and `sim` are names that others use too, and what PYTHONPATH names is searched before the
place where this is installed. Children of the command that are spawned by `multiprocessing` search as their parent.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command, and exit with its code."""
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        from cli.main import main as command
    except KeyboardInterrupt:  # somebody was quicker than what there is to read
        sys.exit(130)

    command()


if __name__ == "__main__":
    main()
