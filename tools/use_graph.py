"""Which definition names which, as mypy understands it: the graph in which `tools/unreached.py` looks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mypy import nodes
from mypy.build import build
from mypy.modulefinder import BuildSource
from mypy.options import Options
from mypy.traverser import NameAndMemberCollector
from mypy.types import (
    CallableType,
    FunctionLike,
    Instance,
    LiteralType,
    NoneType,
    TupleType,
    Type,
    TypedDictType,
    TypeType,
    TypeVarLikeType,
    UnionType,
    get_proper_type,
)

Types = dict[nodes.Expression, Type]
Position = tuple[int, int, str]
"""Line, column, and the last name of an expression that begins there."""

INERT = {
    *(
        "abstractmethod",
        "asynccontextmanager",
        "cache",
        "cached_property",
        "classmethod",
        "contextmanager",
        "dataclass",
    ),
    *("hot_dataclass", "inference_mode", "jit", "lru_cache", "overload", "property", "setter", "staticmethod"),
}
"""Decorators that register nothing: what they decorate has to be named to be reached."""
WHOLE = {"asdict", "astuple", "fields", "getattr", "vars", "model_dump", "model_fields"}
"""What reads every field of an object, or one whose name is computed."""


@dataclass
class Definition:
    """A module, class, function, constant, method or field."""

    name: str
    owner: str
    """The class or module that it stands in; a module has none."""
    module: str
    line: int = 1
    num_lines: int = 1
    is_field: bool = False
    """A variable of a class or of its objects."""
    reached_by: set[str] = field(default_factory=set)
    """Names; one of them in reached code is enough, if the owner is a module or a reached class."""
    uses: set[str] = field(default_factory=set)
    """What it names; `*.name` where mypy does not know of which class, `Class.*` for every field of one."""

    def __post_init__(self) -> None:
        self.reached_by |= {self.name, f"*.{self.last_name}"} if self.owner else {self.name}

    @property
    def last_name(self) -> str:
        """The name without what it stands in."""
        return self.name.rpartition(".")[2]


class UseGraph(dict[str, Definition]):
    """Every definition of some modules, by its full name."""

    def __init__(self, sources: dict[str, Path], options: Options) -> None:
        super().__init__()
        options.export_types = options.preserve_asts = True
        # a source given as text is read anew, all else comes from mypy's cache
        result = build([BuildSource(str(path), name, path.read_text()) for name, path in sources.items()], options)
        assert not result.errors, "\n".join(result.errors)
        modules = [_Module(result.files[name], path.read_text()) for name, path in sources.items()]
        for module in modules:
            self.update(module.definitions)
        self._let_stand_in([info for module in modules for info in module.classes])
        for module in modules:
            module.read_uses(self, result.types)

    def _let_stand_in(self, classes: list[nodes.TypeInfo]) -> None:
        """Let a member be reached through what its class inherits from, and through protocols that the class has."""
        protocols = [info for info in classes if info.is_protocol]
        for info in classes:
            has = {name for base in info.mro for name in base.names}
            stands_for = [protocol for protocol in protocols if has >= set(protocol.protocol_members)]
            for name, symbol in info.names.items():
                definition = self.get(f"{info.fullname}.{name}")
                if definition is None:
                    continue
                for base in (base for base in info.mro[1:] + stands_for if name in base.names):
                    is_ours = f"{base.fullname}.{name}" in self
                    definition.reached_by.add(f"{base.fullname}.{name}" if is_ours else info.fullname)
                if info.is_named_tuple or info.has_base("builtins.BaseException"):
                    definition.reached_by.add(info.fullname)
                if isinstance(symbol.node, nodes.Var):
                    definition.is_field = True
                    definition.reached_by.add(f"{info.fullname}.*")
            for protocol in stands_for:
                self._let_stand_for(info, protocol)

    def _let_stand_for(self, info: nodes.TypeInfo, protocol: nodes.TypeInfo) -> None:
        for name, symbol in protocol.names.items():
            inherited = [self.get(f"{base.fullname}.{name}") for base in info.mro[1:] if name in base.names]
            for definition in filter(None, inherited):  # what it has from a base stands for the protocol's too
                definition.reached_by.add(f"{protocol.fullname}.{name}")
            if isinstance(symbol.node, nodes.Var) and symbol.node.fullname in self:
                self[symbol.node.fullname].reached_by.add(f"{info.fullname}.{name}")  # those that have it may read it


class _Module:
    """One file, as Python's parser and as mypy see it."""

    def __init__(self, tree: nodes.MypyFile, text: str) -> None:
        self.classes: list[nodes.TypeInfo] = []
        self._mypy = tree
        self._ast = ast.parse(text)
        whole = Definition(tree.fullname, "", tree.fullname, num_lines=len(text.splitlines()))
        self.definitions = {whole.name: whole}
        self._user_at = [whole] * (whole.num_lines + 2)
        """Of each line, the innermost definition."""
        self._define(self._ast.body, whole.name, tree.names)

    def _define(self, body: list[ast.stmt], owner: str, names: nodes.SymbolTable) -> None:
        for name, statement in _named(body):
            node = names[name].node if name in names else None
            if node is None or node.fullname != f"{owner}.{name}":
                continue
            self._add(node.fullname, owner, statement)
            if isinstance(statement, ast.ClassDef) and isinstance(node, nodes.TypeInfo):
                self.classes.append(node)
                self._define(statement.body, node.fullname, node.names)
                assigned = [symbol.node for symbol in node.names.values() if symbol.implicit and symbol.node]
                for attribute in assigned:  # by methods, to `self`
                    new = Definition(attribute.fullname, node.fullname, self._mypy.fullname, attribute.line)
                    self.definitions.setdefault(new.name, new)

    def _add(self, name: str, owner: str, statement: ast.stmt) -> None:
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        last = statement.end_lineno or first
        definition = self.definitions.setdefault(name, Definition(name, owner, self._mypy.fullname, first))
        definition.num_lines += last - first
        is_hook = definition.last_name.startswith("__")
        if is_hook or any(_last_name(decorator) not in INERT for decorator in decorators):
            definition.reached_by.add(owner)
        self._user_at[first : last + 1] = [definition] * (last + 1 - first)

    def read_uses(self, graph: UseGraph, types: Types) -> None:
        """Enter into each definition what it names: all but the targets of assignments."""
        targets: set[Position] = set()
        whole: set[Position] = set()
        for node in ast.walk(self._ast):
            self._user_at[getattr(node, "lineno", 0)].uses.update(self._uses_of(node, graph))
            match node:
                case ast.Name(ctx=ast.Store()) | ast.Attribute(ctx=ast.Store()):
                    targets.add(_position(node))
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(), *_]):
                    pass
                case ast.Call(func=function, args=[first, *_]) if _last_name(function) in WHOLE:
                    whole.add(_position(first))
        collector = NameAndMemberCollector()
        self._mypy.accept(collector)
        expressions: list[nodes.NameExpr | nodes.MemberExpr] = [*collector.name_exprs, *collector.member_exprs]
        for expression in expressions:
            position = (expression.line, expression.column, expression.name)
            uses = self._user_at[expression.line].uses
            if position in whole:
                uses.update(f"{info.fullname}.*" for info in _classes_of(types.get(expression)) or ())
            if position not in targets:
                uses.update(_meant(expression, types))
            elif isinstance(expression, nodes.MemberExpr):  # assigning to a property calls its setter
                uses.update(name for name in _meant(expression, types) if name in graph and not graph[name].is_field)

    def _uses_of(self, node: ast.AST, graph: UseGraph) -> Iterator[str]:
        """Yield what mypy does not keep as expressions: imports, types, and names in strings."""
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                inner = [f"{module}.{alias.name}" for alias in names]
                yield from (name for name in (module, *inner) if name in graph and not graph[name].owner)
            case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                yield from self._types_in(annotation)
            case ast.FunctionDef(returns=ast.expr() as result) | ast.AsyncFunctionDef(returns=ast.expr() as result):
                yield from self._types_in(result)
            case ast.Call(func=ast.Name(id="cast" | "NewType" | "TypeVar")):
                yield from self._types_in(node)
            case ast.Call(func=function, args=arguments):
                prefix = {"getattr": "*.", "attrgetter": "*.", "import_module": ""}.get(_last_name(function))
                words = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
                yield from (prefix + word for word in words if prefix is not None and isinstance(word, str))
            case ast.MatchClass(kwd_attrs=attributes):
                yield from (f"*.{attribute}" for attribute in attributes)

    def _types_in(self, annotation: ast.AST) -> Iterator[str]:
        for node in ast.walk(annotation):
            match node:
                case ast.Name(id=name) if name in self._mypy.names:
                    yield self._mypy.names[name].fullname or ""
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in self._mypy.names:
                    yield f"{self._mypy.names[name].fullname}.{attribute}"
                case ast.Constant(value=str(text)) if text.isidentifier():
                    yield from self._types_in(ast.Name(text))


def _named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the definitions in a module's or class's body."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, statement
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, statement
            case ast.If(body=inner, orelse=other):
                yield from _named(inner + other)
            case ast.Try(body=inner, handlers=handlers, orelse=other):
                yield from _named([*inner, *(part for handler in handlers for part in handler.body), *other])


def _last_name(node: ast.expr) -> str:
    called = node.func if isinstance(node, ast.Call) else node
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""


def _position(node: ast.expr) -> Position:
    return node.lineno, node.col_offset, _last_name(node)


def _meant(expression: nodes.NameExpr | nodes.MemberExpr, types: Types) -> Iterator[str]:
    """Yield the full names that a name or an `object.name` may stand for."""
    if expression.node is not None:
        yield expression.fullname or expression.node.fullname
    elif isinstance(expression, nodes.MemberExpr):
        classes = _classes_of(types.get(expression.expr))
        if expression.name in WHOLE:
            yield from (f"{info.fullname}.*" for info in classes or ())
        for info in (None,) if classes is None else classes:
            symbol = None if info is None else info.get(expression.name)
            yield f"*.{expression.name}" if symbol is None or symbol.node is None else symbol.node.fullname


def _classes_of(typ: Type | None) -> list[nodes.TypeInfo] | None:
    """Say which classes an object of a type may have, or what it returns if it is a function; None if unknown."""
    match get_proper_type(typ):
        case UnionType(items=items):
            parts = [_classes_of(item) for item in items]
            return None if None in parts else [info for part in parts for info in part or ()]
        case TypeVarLikeType(upper_bound=inner) | TypeType(item=inner):
            return _classes_of(inner)
        case FunctionLike() as function if function.is_type_obj():
            return [function.type_object()]
        case CallableType(ret_type=result):
            return _classes_of(result)
        case TupleType(partial_fallback=instance) | LiteralType(fallback=instance) | TypedDictType(fallback=instance):
            return [instance.type]
        case Instance(type=info):
            return [info]
        case NoneType():
            return []
    return None
