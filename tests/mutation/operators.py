"""Small faults that a programmer could make, one at a time: where a module has room for one, and how it looks then.

Left alone are assertions and methods that only check (`check_…`), log lines, docstrings, types, decorators and
`__slots__`: a fault there changes no behaviour.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

Change = Callable[[], None]
"""Changes the tree in place."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_METHODS = {"popleft": "pop", "append": "appendleft", "min": "max", "max": "min"}
_LOGGERS = ("_log", "get_logger")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault in one module."""

    line: int
    what: str
    """In words, with what stood there."""
    apply: Change
    """Changes the tree that it was found in."""


def find_mutants(tree: ast.Module) -> list[Mutant]:
    """Return every fault that the operators can make in this module, in a fixed order."""
    return [mutant for node in _mutable(tree) for mutant in _mutants_of(node)]


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes that may be changed, parents first."""
    kept = (getattr(node, "returns", None), getattr(node, "annotation", None), *getattr(node, "decorator_list", ()))
    for child in ast.iter_child_nodes(node):
        if child not in kept and not _is_left_alone(child):
            yield child
            yield from _mutable(child)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.arguments() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name.startswith("check_")
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in _LOGGERS
        case ast.Assign(targets=[ast.Name(id="__slots__" | "_log" | "Part" | "Rows" | "Bool" | "__all__")]):
            return True
        case ast.AnnAssign(value=None):
            return True
    return False


def _mutants_of(node: ast.AST) -> Iterator[Mutant]:
    match node:
        case ast.Compare(ops=[comparison]) if type(comparison) in _COMPARISONS:
            flipped = _COMPARISONS[type(comparison)]()
            yield _mutant(node, "comparison flipped", lambda: setattr(node, "ops", [flipped]))
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _ARITHMETIC and not _is_type(node):
            changed = _ARITHMETIC[type(op)]()
            yield _mutant(node, "operator changed", lambda: setattr(node, "op", changed))
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield _mutant(node, "and/or swapped", lambda: setattr(node, "op", other))
        case ast.Constant(value=bool(value)):
            yield _mutant(node, "boolean flipped", lambda: setattr(node, "value", not value))
        case ast.Constant(value=int(number)):
            yield _mutant(node, "off by one", lambda: setattr(node, "value", number + 1))
    yield from _mutants_of_control(node)
    yield from _removals(node)


def _mutants_of_control(node: ast.AST) -> Iterator[Mutant]:
    match node:
        case ast.If(test=ast.UnaryOp(op=ast.Not())) | ast.IfExp(test=ast.UnaryOp(op=ast.Not())):
            return  # the condition itself is changed
        case ast.If() | ast.IfExp():
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield _mutant(node.test, "condition negated", lambda: setattr(node, "test", negated))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _mutant(node, "not removed", lambda: setattr(node, "operand", ast.UnaryOp(ast.Not(), operand)))
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield _mutant(node, "returns None", lambda: setattr(node, "value", ast.Constant(None)))
        case ast.Attribute(attr=name) if name in _METHODS:
            yield _mutant(node, f"{_METHODS[name]} instead", lambda: setattr(node, "attr", _METHODS[name]))
        case ast.Name(id="min" | "max" as name):
            yield _mutant(node, f"{_METHODS[name]} instead", lambda: setattr(node, "id", _METHODS[name]))


def _removals(node: ast.AST) -> Iterator[Mutant]:
    """A statement that is forgotten; one whose name others need would be found by any run at all."""
    for field in ("body", "orelse", "finalbody"):
        statements = getattr(node, field, None)
        if not isinstance(statements, list) or isinstance(node, ast.ClassDef | ast.Module) or _is_constructor(node):
            continue
        for place, statement in enumerate(statements):
            if not _is_left_alone(statement) and _has_effect(statement):
                forget = partial(operator.setitem, statements, place, ast.Pass())
                yield _mutant(statement, "statement removed", forget)


def _is_constructor(node: ast.AST) -> bool:
    """Return whether the statements only make fields: any run at all would find that one is missing."""
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _has_effect(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr() | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Raise():
            return True
        case ast.Assign(targets=targets):
            return not any(isinstance(name, ast.Name) for target in targets for name in _targets_of(target))
        case ast.Return(value=None):
            return True
    return False


def _targets_of(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_type(node: ast.BinOp | ast.AugAssign) -> bool:
    """Return whether it names a type, as `A | None`."""
    return isinstance(node, ast.BinOp) and (_is_none(node.right) or _is_none(node.left))


def _mutant(node: ast.AST, what: str, apply: Change) -> Mutant:
    text = " ".join(ast.unparse(node).split())
    return Mutant(getattr(node, "lineno", 0), f"{what}: {text if len(text) <= 70 else text[:67] + '...'}", apply)
