"""What no root reaches is found by what names mean, not by how they are spelled."""

from __future__ import annotations

import os

import pytest
from mypy.options import Options

from tools.unreached import judge, roots_of
from tools.use_graph import UseGraph

Judged = dict[str, tuple[set[str], list[str]]]
"""What is dead, and what is allowed without need, by the list of what is allowed."""

MODULES = {
    "home": "",
    "home.pages": """
from __future__ import annotations
from dataclasses import asdict, dataclass, field
from typing import Protocol

class Named(Protocol):
    def name(self) -> str: ...

class Pages:
    num_seen = 0
    def __init__(self) -> None:
        self.count = 0
        self.written = 0
    def release(self) -> None:
        self.written += 1
    def again(self) -> None:
        self.again()
    def name(self) -> str:
        return str(self.count)

class Placed(Protocol):
    def spine(self) -> str: ...
    def place(self) -> str: ...

class Bound:
    def spine(self) -> str:
        return "bound"

class Book(Bound):
    def place(self) -> str:
        return "shelf"

class Lock:
    def release(self) -> None: ...

class Door(Protocol):
    is_open: bool

class Gate:
    is_open = False
    @property
    def way(self) -> int:
        return 0
    @way.setter
    def way(self, way: int) -> None:
        print(self.is_open)

def shut(door: Door) -> None:
    door.is_open = False

@dataclass
class Shown:
    inner: Inside

@dataclass
class Inside:
    as_text: str

@dataclass
class Kept:
    read: str
    unread: str

class BrokenError(Exception):
    def __init__(self, code: int) -> None:
        self.code = code

def title(thing: Named) -> str:
    return thing.name()

def find(thing: Placed) -> str:
    return thing.spine() + thing.place()

def show(shown: Shown) -> dict[str, object]:
    return asdict(shown)

def chain() -> None:
    end_of_chain()

def end_of_chain() -> None: ...
""",
    "home.lazy": "LIMIT = 3\nUNUSED = 4\n",
    "home.alone": "def f() -> None: ...\n",
    "home.__main__": """
from home.pages import Book, BrokenError, Gate, Inside, Kept, Lock, Pages, Shown, find, show, shut, title

def main(lock: Lock | None) -> None:
    if lock is not None:
        lock.release()
    from home.lazy import LIMIT
    gate = Gate()
    gate.way = 3
    shut(gate)
    print(title(Pages()), find(Book()), LIMIT, show(Shown(Inside("text"))), Kept("read", "unread").read)
    raise BrokenError(3)

main(Lock())
""",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    folder = tmp_path_factory.mktemp("home")
    sources = {}
    for name, text in MODULES.items():
        sources[name] = folder / f"{name}.py"
        sources[name].write_text(text)
    options = Options()
    options.incremental, options.cache_dir = False, os.devnull
    graph = UseGraph(sources, options)
    roots = roots_of(graph, sources)
    lists = {
        "none": [],
        "chain": ["home.pages.chain"],
        "needless": ["home.pages.chain", "home.lazy.LIMIT", "home.gone"],
    }
    judged = {key: judge(graph, roots, allowed) for key, allowed in lists.items()}
    return {key: ({one.name for one in dead}, needless) for key, (dead, needless) in judged.items()}


def test_what_only_itself_or_the_unreached_name_is_found(found: Judged) -> None:
    """`again` names itself; `end_of_chain` is named by `chain`, which nobody names; a module is found as a whole."""
    dead, _ = found["none"]
    assert {"home.pages.Pages.again", "home.pages.chain", "home.pages.end_of_chain"} <= dead
    assert {"home.lazy.UNUSED", "home.alone"} <= dead
    assert "home.alone.f" not in dead


def test_a_method_is_told_from_another_of_its_name(found: Judged) -> None:
    dead, _ = found["none"]
    assert "home.pages.Pages.release" in dead
    assert "home.pages.Lock.release" not in dead


def test_a_method_is_reached_through_a_protocol_of_its_class(found: Judged) -> None:
    """Also where the class has it from another one."""
    reached = {"home.pages.Pages.name", "home.pages.Pages.count", "home.pages.Named.name", "home.pages.Bound.spine"}
    assert not reached & found["none"][0]


def test_a_field_is_reached_when_it_is_read_and_not_when_it_is_set(
    found: Judged,
) -> None:
    """`asdict` reads all fields, those of held objects too; an error's fields are for whoever catches it."""
    dead, _ = found["none"]
    assert {"home.pages.Pages.written", "home.pages.Pages.num_seen", "home.pages.Kept.unread"} <= dead
    read = {
        "home.pages.Kept.read",
        "home.pages.Shown.inner",
        "home.pages.Inside.as_text",
        "home.pages.BrokenError.code",
    }
    assert not read & dead


def test_setting_a_property_reaches_it_and_what_reads_a_field_reaches_the_protocols(found: Judged) -> None:
    assert not {"home.pages.Gate.way", "home.pages.Gate.is_open", "home.pages.Door.is_open"} & found["none"][0]


def test_imports_inside_functions_reach(found: Judged) -> None:
    assert not {"home.lazy", "home.lazy.LIMIT"} & found["none"][0]


def test_an_allowed_name_reaches_what_it_names(found: Judged) -> None:
    dead, needless = found["chain"]
    assert dead == found["none"][0] - {"home.pages.chain", "home.pages.end_of_chain"}
    assert needless == []


def test_names_that_are_reached_or_gone_may_not_stay_allowed(found: Judged) -> None:
    assert found["needless"][1] == ["home.gone", "home.lazy.LIMIT"]
