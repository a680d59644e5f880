"""Scenarios that ship, and files of others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shared.reading import InputFile
from sim.names import unknown_name
from sim.scenarios.scenario import Scenario, validated

SCENARIOS: Final = Path(__file__).parent
"""Folder of the scenarios that ship."""
MAX_SCENARIO_BYTES: Final = 2**20
"""Largest file of a scenario."""


def scenario_names() -> list[str]:
    """Return the names of the scenarios that ship, sorted."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Return a scenario that ships, by name, or one from a file (anything that ends in `.toml`).

    Raises:
        StartupError: there is none, or its file is malformed.
    """
    if isinstance(name_or_path, Path) or name_or_path.endswith(".toml"):
        path = Path(name_or_path)
    elif name_or_path in scenario_names():
        path = SCENARIOS / f"{name_or_path}.toml"
    else:
        raise unknown_name("there is no scenario", name_or_path, scenario_names(), "files that end in .toml")
    tables = InputFile(path, MAX_SCENARIO_BYTES, "scenario", "Name a .toml file").read_toml()
    return validated({**tables, "name": path.stem}, f"scenario {path}")
