"""Prints what an image has to install: the dependencies in pyproject.toml and the client's, and those of some extras.

    python requirements.py [EXTRA …]

Apart from the code, so that a change of the code does not install everything anew.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(root: Path, extras: list[str]) -> list[str]:
    """Return the requirements, sorted, without the project's own packages."""
    found: list[str] = []
    for path in (root / "pyproject.toml", root / "client" / "pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        found += project["dependencies"]
        optional = project.get("optional-dependencies", {})
        found += [line for extra in extras for line in optional.get(extra, [])]
    return sorted({line for line in found if not line.startswith("sluice")})


if __name__ == "__main__":
    sys.stdout.write("".join(f"{line}\n" for line in requirements(Path(__file__).parent, sys.argv[1:])))
