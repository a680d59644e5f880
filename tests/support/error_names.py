"""The codes and topics that the code can say of what goes wrong, read from its source.

What stands there as a code is followed to its texts: through names, `a if … else b`, parameters and f-strings.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Final

from services.dispatcher.endpoints.guided import GuideCode
from services.dispatcher.http.errors import RATE_LIMITED
from services.dispatcher.session.request import FailureCode
from shared.browsers import Foreign

ROOT: Final = Path(__file__).parents[2]
_CODE_AT: Final = {"ApiError": 1, "invalid": 0}
_TOPIC_AT: Final = {"StartupError": 2, "HubUnreachableError": 2, "ConfigError": 2, "kind": 2, "CommandError": 3}
_IMPORTED: Final = {"RATE_LIMITED": RATE_LIMITED}
_CLASSES: Final = (ROOT / "shared" / "errors.py", ROOT / "cli" / "exit_codes.py")
"""Where topics are taken, and none is said."""


def codes() -> set[str]:
    """Return every `code` of the API."""
    found = {code.value for code in (*FailureCode, *Foreign, *GuideCode)}
    for module in _modules("services/dispatcher"):
        found |= set(module.texts_at(_CODE_AT))
    return found


def topics() -> set[str]:
    """Return every topic to which a line of a command or a service points."""
    found: set[str] = set()
    for module in (each for folder in ("cli", "services", "shared", "sim") for each in _modules(folder)):
        found |= set(module.texts_at(_TOPIC_AT | {"pointer": 0, "StartupError.__init__": 3}))
    return found


def _modules(folder: str) -> Iterator[_Module]:
    return (_Module(path) for path in sorted((ROOT / folder).rglob("*.py")) if path not in _CLASSES)


class _Module:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._parents = {id(child): node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}

    def texts_at(self, places: dict[str, int]) -> Iterator[str]:
        """Give the texts that calls have at these places, or by the name `topic`."""
        for call in self._calls():
            index = places.get(ast.unparse(call.func))
            if index is None:
                continue
            named = [each.value for each in call.keywords if each.arg == "topic"]
            for value in [*call.args[index : index + 1], *named]:
                yield from self._texts(value)

    def _calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))

    def _texts(self, node: ast.expr) -> Iterator[str]:
        match node:
            case ast.Constant(value=str(text)):
                yield text
            case ast.IfExp():
                yield from self._texts(node.body)
                yield from self._texts(node.orelse)
            case ast.JoinedStr():
                parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
                yield from map("".join, product(*(list(self._texts(part)) for part in parts)))
            case ast.Name(id=name) if name in _IMPORTED:
                yield _IMPORTED[name]
            case ast.Name(id=name):
                yield from self._texts_of(name, self._function(node))
            case ast.Attribute(attr="value"):
                return  # of an enumeration, all of whose members count
            case ast.Call() if ast.unparse(node.func) == "topic_of":
                return  # that of a server's error, if there is a section
            case _:
                raise AssertionError(f"{self.path}:{node.lineno}: what does {ast.unparse(node)} say?")

    def _texts_of(self, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
        """Give the texts that a name stands for: those assigned to it in the function, or given to the function."""
        values: list[ast.expr] = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets)
        ]
        names = [argument.arg for argument in function.args.args if argument.arg != "self"]
        if name in names:
            at = names.index(name)
            called = (call for call in self._calls() if ast.unparse(call.func).removeprefix("self.") == function.name)
            values += [call.args[at] for call in called if len(call.args) > at]
        assert values, f"{self.path}: nothing says what {name} is in {function.name}"
        for value in values:
            yield from self._texts(value)

    def _function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef:
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node = self._parents[id(node)]
        return node
