"""Every test file whose results depend on the kernels runs without them too: it has the mark `kernels`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
WAYS_TO_A_MODEL = {
    "tests.support.runners",
    "tests.support.exchanged_kv",
    "tests.support.cluster",
    "services.worker.executor.runner",
}
"""Modules that load a model or start a worker that does."""
NOT_ABOUT_NUMBERS = {"gpu", "faults"}
"""Folders whose tests need a device, or kill processes whatever these compute."""
ONCE_IS_ENOUGH = {
    "test_native_library.py",
    "test_native_team.py",
    "test_step_threads.py",
    "test_cluster_bus.py",
    "test_bad_inputs_beside_streams.py",
}
"""Files about the native library alone, or about what a cluster does whatever it computes."""


def imported(tree: ast.Module) -> set[str]:
    return {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def is_marked(tree: ast.Module) -> bool:
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    marks = [ast.unparse(node.value) for node in assigned if ast.unparse(node.targets[0]) == "pytestmark"]
    return any("pytest.mark.kernels" in mark for mark in marks)


@pytest.mark.slow
def test_whoever_loads_a_model_has_the_mark() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if path.parent.name not in NOT_ABOUT_NUMBERS]
    trees = {path.name: ast.parse(path.read_text()) for path in files}
    with_model = {name for name, tree in trees.items() if imported(tree) & WAYS_TO_A_MODEL} - ONCE_IS_ENOUGH
    marked = {name for name, tree in trees.items() if is_marked(tree)}
    assert len(with_model) > 10, "the search finds too little"
    assert not with_model - marked, "begin these files with pytestmark = pytest.mark.kernels, or add them above"
    assert not marked - with_model, "these files load no model"
