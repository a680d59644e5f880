"""Finds what no process, command, SDK, simulator or benchmark reaches: `python -m tools.unreached`.

A definition is reached if reached code names it. Mypy says what a name means, so `pages.release()` reaches the method
of the class that `pages` has and of those that stand in for it, not everything called `release`; where a type is
unknown, every definition of the name counts. It starts at the modules that run by themselves and at the client's public
interface; tests are no part of it. Assigning to a field does not reach it, nor does a definition's own body.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from mypy.main import process_options

from tools.unreached_allowed import ALLOWED
from tools.use_graph import Definition, UseGraph

Graph = Mapping[str, Definition]

APART = {"tests"}
"""Packages that reach nothing."""
SCRIPTS = {"vectors.make": Path("client/vectors/make.py")}
"""What runs by itself and is in no package."""
PUBLIC = "sluice_client"
"""The package in which what is named in an `__all__`, and what is public in its classes, is for others to use."""


def reached(graph: Graph, roots: Iterable[str]) -> set[str]:
    """Find the names of the definitions that some names lead to."""
    waiting: dict[str, list[str]] = defaultdict(list)
    members: dict[str, list[str]] = defaultdict(list)
    for definition in graph.values():
        members[definition.owner].append(definition.name)
        for name in definition.reached_by:
            waiting[name].append(definition.name)
    found: set[str] = set()
    named: set[str] = set()
    pending = list(roots)
    while pending:
        name = pending.pop()
        if name in named:
            continue
        named.add(name)
        if name.endswith(".*"):  # with the fields of an object go those of what it holds
            pending += [f"{use}.*" for held in waiting[name] for use in graph[held].uses]
        candidates = waiting[name].copy()
        while candidates:
            candidate = graph[candidates.pop()]
            owner = graph.get(candidate.owner)
            is_open = owner is None or not owner.owner or owner.name in found
            if candidate.name not in found and is_open and candidate.reached_by & named:
                found.add(candidate.name)
                pending += [candidate.module, candidate.module.rpartition(".")[0], *candidate.uses]
                candidates += members[candidate.name]
    return found


def roots_of(graph: Graph, sources: Mapping[str, Path]) -> set[str]:
    """Find the modules that run by themselves, and what is public."""
    texts = {name: path.read_text() for name, path in sources.items()}
    roots = {name for name, text in texts.items() if name.endswith("__main__") or '__name__ == "__main__"' in text}
    inside = [definition for definition in graph.values() if definition.module.split(".")[0] == PUBLIC]
    words = {word for definition in inside if not definition.owner for word in _exports(texts[definition.module])}
    exported = {one.name for one in inside if one.owner == one.module and one.last_name in words}
    public = {one.name for one in inside if one.owner in exported and not one.last_name.startswith("_")}
    return roots | exported | public | ({PUBLIC} & graph.keys())


def _exports(text: str) -> list[str]:
    """Return what a module's `__all__` names."""
    for statement in ast.parse(text).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=ast.List() as names):
                return [str(name) for name in ast.literal_eval(names)]
    return []


def judge(graph: Graph, roots: set[str], allowed: Iterable[str]) -> tuple[list[Definition], list[str]]:
    """Find the outermost definitions that are not reached, and the allowed names that need no reason."""
    allowed = set(allowed)
    found = reached(graph, roots | allowed)
    outermost = [one for one in graph.values() if not one.owner or one.owner in found]
    dead = [one for one in outermost if one.name not in found and one.num_lines]  # an empty file marks a package
    needless = [
        name for name in sorted(allowed) if name not in graph or name in reached(graph, roots | allowed - {name})
    ]
    return dead, needless


def main() -> int:
    """Print what is not reached, and what is allowed without need; return 1 if there is any of either."""
    sources = {
        source.module: Path(source.path)
        for source in process_options([])[0]
        if source.path and source.path.endswith(".py") and source.module.split(".")[0] not in APART
    }
    sources |= SCRIPTS
    graph = UseGraph(sources, process_options([])[1])
    roots = roots_of(graph, sources)
    dead, needless = judge(graph, roots, ALLOWED)
    for one in dead:
        what = "is set, but never read" if one.is_field else f"is not reached ({one.num_lines} lines)"
        print(f"{sources[one.module].resolve().relative_to(Path.cwd())}:{one.line}: {one.name} {what}")
    for name in needless:
        print(f"tools/unreached_allowed.py: {name} is reached, or is no more: take it off the list")
    product = {name for name in roots if not name.startswith("benchmarks.")}
    measured = {one.name for one in judge(graph, product, ALLOWED)[0] if not one.module.startswith("benchmarks")}
    print("by benchmarks alone:", *sorted(measured - {one.name for one in dead}))
    print(f"{len(graph)} definitions, {len(dead)} not reached, {len(needless)} allowed without need")
    return 1 if dead or needless else 0


if __name__ == "__main__":
    sys.exit(main())
