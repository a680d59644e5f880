"""The client is a distribution of its own: the standard library, and aiohttp only for the SDK."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sluice_client

PACKAGE = Path(sluice_client.__file__).parent
LIGHT_MODULES = ["sluice_client", "sluice_client.qoe", "sluice_client.pacer", "sluice_client.paced_stream"]
ALIASES = {"ChatMessage", "ReasoningEffort", "ResponseFormat", "ServiceTier", "ToolChoice"}
"""Of types, which have no name of their own."""


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_it_loads_neither_aiohttp_nor_numpy(module: str) -> None:
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(result.stdout.split())
    assert "sluice_client" in loaded
    assert not loaded & {"aiohttp", "numpy", "pydantic", "msgpack", "shared", "services", "torch"}


def test_every_public_name_can_be_imported_on_first_use() -> None:
    for name in sluice_client.__all__:
        value = getattr(sluice_client, name)
        assert name in ALIASES or value.__name__ == name
    assert dir(sluice_client) == sorted(sluice_client.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = sluice_client.Nothing


def test_no_module_imports_more_than_the_standard_library_and_aiohttp() -> None:
    imported: dict[str, set[str]] = {}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            imported.setdefault(path.name, set()).update(name.partition(".")[0] for name in names)
    foreign = {file: names - sys.stdlib_module_names - {"sluice_client"} for file, names in imported.items()}
    assert {file: names for file, names in foreign.items() if names} == {
        "socket_transport.py": {"aiohttp"},
        "transport.py": {"aiohttp"},
    }
