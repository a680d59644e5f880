"""Imports one module with one fault in it, in this process only; no file is changed."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path

from tests.mutation.operators import Mutant, find_mutants

VARIABLE = "SLUICE_MUTANT"
"""Environment: `<module>:<number of the mutant>`."""


def mutants_of(module: str) -> tuple[ast.Module, list[Mutant]]:
    """Return a module's tree, and the faults that can be made in it; their places in the list are their numbers."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    assert spec.origin is not None, f"{module} has no file"
    tree = ast.parse(Path(spec.origin).read_bytes())
    return tree, find_mutants(tree)


def install(module: str, number: int) -> None:
    """Import the module with this fault. It must not have been imported yet."""
    assert module not in sys.modules, f"{module} was imported before its fault was made"
    tree, mutants = mutants_of(module)
    mutants[number].apply()
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"no module {module}"
    made = sys.modules[module] = importlib.util.module_from_spec(spec)
    exec(compile(ast.fix_missing_locations(tree), str(spec.origin), "exec", dont_inherit=True), vars(made))
    parent, _, name = module.rpartition(".")
    setattr(sys.modules[parent], name, made)


if chosen := os.environ.get(VARIABLE):
    install(chosen.partition(":")[0], int(chosen.partition(":")[2]))
