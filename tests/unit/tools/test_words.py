"""One word for one thing, as far as a machine can see (`docs/design/words.md`)."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = ("cli", "client/sluice_client", "services", "shared", "sim")


@pytest.mark.slow
def test_no_two_public_classes_have_one_name() -> None:
    """The simulator may import every service, so a name stands for one class in all of them."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in (path for top in PRODUCT for path in sorted((ROOT / top).rglob("*.py"))):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
