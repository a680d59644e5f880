"""Imports one module with one fault in it, in this process only; no file is changed."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

from tests.mutation.operators import Mutant, find_mutants

VARIABLE = "SLUICE_MUTANT"
"""Environment: `<module>:<number of the mutant>`."""


def mutants_of(module: str) -> list[Mutant]:
    """Return the faults that can be made in a module; their places in the list are their numbers."""
    return find_mutants(ast.parse(_source_of(module)))


def _source_of(module: str) -> bytes:
    spec = importlib.machinery.PathFinder.find_spec(module, _path_of(module))
    assert spec is not None, f"no module {module}"
    assert spec.origin is not None, f"{module} has no file"
    return importlib.machinery.SourceFileLoader(module, spec.origin).get_data(spec.origin)


def _path_of(module: str) -> list[str] | None:
    package = module.rpartition(".")[0]
    return [os.path.join(entry or ".", *package.split(".")) for entry in sys.path] if package else None  # noqa: PTH118


class _Loader(importlib.machinery.SourceFileLoader):
    number = 0

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source with the fault; cached code is passed by."""
        del fullname
        tree = ast.parse(self.get_data(self.path))
        find_mutants(tree)[self.number].apply()
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, number: int) -> None:
        self._module = module
        self._number = number

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the one module; all others are found as ever."""
        del target
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None, f"no module {fullname}"
        assert spec.origin is not None, f"{fullname} has no file"
        loader = _Loader(fullname, spec.origin)
        loader.number = self._number
        spec.loader = loader
        return spec


def install_from_environment() -> None:
    """Make the fault that the environment names, if it names one. The module must not have been imported yet."""
    chosen = os.environ.get(VARIABLE)
    if chosen is None:
        return
    module, _, number = chosen.partition(":")
    assert module not in sys.modules, f"{module} was imported before its fault was made"
    sys.meta_path.insert(0, _Finder(module, int(number)))


install_from_environment()
