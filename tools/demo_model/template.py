"""Grammar nodes that both write and read text, and the small language in which templates are written.

A template is text with two marks:

    {var}  {var.form}   an entity's form; a capital first letter (`{Hero.they}`) capitalises the form
    [a|b|]              one of several templates, chosen evenly; they nest and may be empty

A slot whose variable is unbound chooses an entity from the variable's domain and binds it; every later slot of the
variable repeats that entity. Writing and reading walk the same tree, so a reader accepts a text exactly when the
writer could have produced it. This module knows no words and no model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol


@dataclass(frozen=True, eq=False)
class Entity:
    """A thing that texts mention, with every form in which they mention it.

    Attributes:
        key: unique in its domain; it also stands for the plain `{var}`.
        forms: the text of `{var.form}` by form.
    """

    key: str
    forms: Mapping[str, str] = field(default_factory=dict)

    def form(self, name: str) -> str:
        """Return the text of one form; the empty name is the key itself."""
        return self.forms[name] if name else self.key


Env = Mapping[str, Entity]
"""The entities that a text has bound so far, by variable."""


@dataclass
class Writer:
    """The state of writing one text.

    Attributes:
        rng: where every choice comes from.
        env: bindings; the writer owns it and adds to it.
        parts: what has been written, to be joined.
        choice_nats: minus the log probability of the choices made so far, in nats.
    """

    rng: Random
    env: dict[str, Entity]
    parts: list[str] = field(default_factory=list)
    choice_nats: float = 0.0

    def pick(self, count: int) -> int:
        """Choose one of `count` options evenly."""
        self.choice_nats += math.log(count)
        return self.rng.randrange(count)

    @property
    def text(self) -> str:
        """What has been written."""
        return "".join(self.parts)


@dataclass
class Reader:
    """One text under recognition.

    Attributes:
        text: the whole text.
        furthest: the first character that no derivation has explained yet, for messages.
    """

    text: str
    furthest: int = 0

    def literal(self, expected: str, at: int) -> int | None:
        """Return the position after `expected`, or None if the text does not go on with it."""
        if not self.text.startswith(expected, at):
            return None
        after = at + len(expected)
        self.furthest = max(self.furthest, after)
        return after


State = tuple[int, Env]
"""How far a derivation has read, and what it has bound."""


class Node(Protocol):
    """A piece of grammar."""

    def write(self, out: Writer) -> None:
        """Append one text of this piece to the writer."""

    def read(self, text: Reader, at: int, env: Env) -> Iterator[State]:
        """Yield every state in which this piece can end when it starts at `at`."""


class Domain(Protocol):
    """The entities that a variable can be bound to."""

    def choose(self, out: Writer) -> Entity:
        """Choose an entity."""

    def at(self, text: Reader, at: int, form: str, env: Env) -> Iterator[tuple[int, Entity]]:
        """Yield the entities whose form stands at a position, with the position after it."""


@dataclass(frozen=True)
class Closed:
    """A domain with a fixed list.

    Attributes:
        entities: chosen evenly.
        unlike: a variable whose entity's key must differ, or the empty string.
    """

    entities: Sequence[Entity]
    unlike: str = ""

    def _allowed(self, env: Env) -> Sequence[Entity]:
        if self.unlike not in env:
            return self.entities
        return [entity for entity in self.entities if entity.key != env[self.unlike].key]

    def choose(self, out: Writer) -> Entity:
        """Choose an entity evenly."""
        allowed = self._allowed(out.env)
        return allowed[out.pick(len(allowed))]

    def at(self, text: Reader, at: int, form: str, env: Env) -> Iterator[tuple[int, Entity]]:
        """Yield the listed entities whose form stands at `at`."""
        for entity in self._allowed(env):
            after = text.literal(entity.form(form), at)
            if after is not None:
                yield after, entity


@dataclass(frozen=True)
class Literal:
    """Fixed text."""

    text: str

    def write(self, out: Writer) -> None:
        """Append the text."""
        out.parts.append(self.text)

    def read(self, text: Reader, at: int, env: Env) -> Iterator[State]:
        """Yield the end if the text stands here."""
        after = text.literal(self.text, at)
        if after is not None:
            yield after, env


@dataclass(frozen=True)
class Slot:
    """A form of a variable's entity; binds the variable if it is unbound."""

    variable: str
    form: str
    capital: bool
    domain: Domain

    def _shown(self, entity: Entity) -> str:
        shown = entity.form(self.form)
        return shown[0].upper() + shown[1:] if self.capital else shown

    def write(self, out: Writer) -> None:
        """Append the form, choosing the entity first if need be."""
        if self.variable not in out.env:
            out.env[self.variable] = self.domain.choose(out)
        out.parts.append(self._shown(out.env[self.variable]))

    def read(self, text: Reader, at: int, env: Env) -> Iterator[State]:
        """Yield the end for the bound entity, or for each entity that fits."""
        bound = env.get(self.variable)
        if bound is not None:
            after = text.literal(self._shown(bound), at)
            if after is not None:
                yield after, env
            return
        assert not self.capital, f"{self.variable} must be bound before a capitalised slot"
        for after, entity in self.domain.at(text, at, self.form, env):
            yield after, {**env, self.variable: entity}


@dataclass(frozen=True)
class Let:
    """Binds a variable and writes nothing."""

    variable: str
    entity: Entity

    def write(self, out: Writer) -> None:
        """Bind the variable."""
        out.env[self.variable] = self.entity

    def read(self, text: Reader, at: int, env: Env) -> Iterator[State]:
        """Yield the same position with the variable bound; nothing if it is bound to something else."""
        del text
        bound = env.get(self.variable)
        if bound is None or bound.key == self.entity.key:
            yield at, {**env, self.variable: self.entity}


@dataclass(frozen=True)
class Chain:
    """Pieces one after another."""

    nodes: Sequence[Node]

    def write(self, out: Writer) -> None:
        """Write each piece in turn."""
        for node in self.nodes:
            node.write(out)

    def read(self, text: Reader, at: int, env: Env) -> Iterator[State]:
        """Yield every way to read all pieces."""
        return self._read_from(0, text, at, env)

    def _read_from(self, index: int, text: Reader, at: int, env: Env) -> Iterator[State]:
        if index == len(self.nodes):
            yield at, env
            return
        for after, bound in self.nodes[index].read(text, at, env):
            yield from self._read_from(index + 1, text, after, bound)


@dataclass(frozen=True)
class Choice:
    """One of several pieces, chosen evenly."""

    nodes: Sequence[Node]

    def write(self, out: Writer) -> None:
        """Write one of the pieces."""
        self.nodes[out.pick(len(self.nodes))].write(out)

    def read(self, text: Reader, at: int, env: Env) -> Iterator[State]:
        """Yield every way to read any of the pieces."""
        for node in self.nodes:
            yield from node.read(text, at, env)


@dataclass(frozen=True)
class Case:
    """The piece that belongs to a variable's entity; the variable must be bound."""

    variable: str
    nodes: Mapping[str, Node]

    def write(self, out: Writer) -> None:
        """Write the piece of the bound entity."""
        self.nodes[out.env[self.variable].key].write(out)

    def read(self, text: Reader, at: int, env: Env) -> Iterator[State]:
        """Read the piece of the bound entity."""
        return self.nodes[env[self.variable].key].read(text, at, env)


_MARKS = re.compile(r"([\[\]|])|\{([A-Za-z]\w*)(?:\.(\w+))?\}")


class Templates:
    """Compiles templates against the domains of their variables."""

    def __init__(self, domains: Mapping[str, Domain]) -> None:
        self._domains = domains

    def one(self, template: str) -> Node:
        """Compile one template; an unknown variable or an open bracket is an assertion error."""
        node, after = self._alternatives(template, 0, depth=0)
        assert after == len(template), f"stray bracket at {after} in {template!r}"
        return node

    def any_of(self, *templates: str) -> Node:
        """Compile a choice between templates."""
        return Choice([self.one(template) for template in templates])

    def _alternatives(self, template: str, at: int, depth: int) -> tuple[Node, int]:
        options: list[Node] = []
        pieces: list[Node] = []
        while True:
            mark = _MARKS.search(template, at)
            end = mark.start() if mark else len(template)
            if end > at:
                pieces.append(Literal(template[at:end]))
            if mark is None:
                assert depth == 0, f"open bracket in {template!r}"
                options.append(Chain(pieces))
                return _simplest(options), end
            at = mark.end()
            if mark[2]:
                pieces.append(self._slot(mark[2], mark[3] or ""))
            elif mark[1] == "[":
                inner, at = self._alternatives(template, at, depth + 1)
                pieces.append(inner)
            else:
                assert depth > 0, f"{mark[1]!r} outside brackets in {template!r}"
                options.append(Chain(pieces))
                pieces = []
                if mark[1] == "]":
                    return _simplest(options), at

    def _slot(self, name: str, form: str) -> Slot:
        variable = name[0].lower() + name[1:]
        return Slot(variable, form, name[0].isupper(), self._domains[variable])


def _simplest(options: list[Node]) -> Node:
    return options[0] if len(options) == 1 else Choice(options)


def readings(node: Node, text: str, env: Env) -> Iterator[Env]:
    """Yield the bindings of every derivation of the whole text; none if the grammar cannot produce it."""
    for after, bound in node.read(Reader(text), 0, env):
        if after == len(text):
            yield bound
