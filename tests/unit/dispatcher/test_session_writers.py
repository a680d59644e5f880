"""A session is written by its own methods only: nobody else in the dispatcher assigns its fields, or what they hold."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import services.dispatcher
from services.dispatcher.session import history, questions, session

ROOM = Path(services.dispatcher.__path__[0])
OWN = {"session/session.py", "session/history.py", "session/questions.py"}
FIELDS = {
    *session.Session.__slots__,
    *(field.name for part in (history.History, questions.Questions) for field in fields(part)),
}
MUTATORS = {
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "set",
    "setdefault",
    "update",
}
OTHERS = {
    "call.fate.finish": "`Fate`: how a whole call ended",
    "choice.failure": "`Choice`: of a request that was never admitted",
    "peer.incarnation": "`_Peer`: process of a worker",
    "self._usage.tokens": "`_Usage`: of a tenant",
}
"""What is called like a field of a session, and is none."""


def written(tree: ast.AST) -> Iterator[str]:
    """Yield each place but `self.…` that is called like a field of a session, and is written to, as it is spelled."""
    for node in ast.walk(tree):
        place: ast.expr | None = None
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            place = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            place = node.func.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"setattr", "__setattr__"}:
            place = None if ast.unparse(node.args[0]) == "self" else ast.Attribute(node.args[0], "tokens", ast.Store())
        while isinstance(place, ast.Subscript):
            place = place.value
        if isinstance(place, ast.Attribute) and place.attr in FIELDS and ast.unparse(place.value) != "self":
            yield ast.unparse(place)


def test_nobody_but_its_own_methods_writes_a_session() -> None:
    found = [
        (str(path.relative_to(ROOM)), place)
        for path in sorted(ROOM.rglob("*.py"))
        if str(path.relative_to(ROOM)) not in OWN
        for place in written(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert [each for each in found if each[1] not in OTHERS] == []
    assert {place for _, place in found} == OTHERS.keys(), "an exception that is no more"


@pytest.mark.parametrize(
    "line",
    [
        "session.tokens = []",
        "one.history.num_blames += 1",
        "a.worker_id, b = b, a",
        "del session.reader",
        "self._session.tokens.append(3)",
        "for session.attempt in range(3): pass",
        "session.held[3] = part",
        "session.logprobs[0][1] = 2",
        "session.ended.set()",
        "setattr(session, name, 3)",
        "x.questions.is_suspect: bool = True",
    ],
)
def test_every_way_to_write_is_seen(line: str) -> None:
    assert list(written(ast.parse(line)))


@pytest.mark.parametrize("line", ["self.tokens = 3", "a = session.tokens", "session.fence()", "session.kept = 3"])
def test_what_is_no_write_to_a_session_is_not_one(line: str) -> None:
    assert not list(written(ast.parse(line)))
