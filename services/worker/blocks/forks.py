"""Sequences that wait for another one's prompt (n > 1): the bit `Hold.FORK`, and who is whose parent.

A child waits while its parent is on its way: waiting or running, its prompt not computed. It goes on when the prompt is
computed, and also when nothing is to be expected any more: the parent ends, is preempted, or has no room.
"""

from __future__ import annotations

import numpy as np

from services.worker.sequences.table import Hold, SequenceTable, Status


class Forks:
    """Parents and children among the rows; the only writer of `Hold.FORK`."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._parent: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._awaited: dict[int, list[int]] = {}
        """Children that wait, by the parent that they wait for."""

    def add(self, child: int, parent: int, *, has_prompt: bool = False) -> None:
        """Take note of a row that begins like another one; it waits if that makes sense.

        Args:
            child: the row.
            parent: the other one.
            has_prompt: the child finds its prompt's KV without it.
        """
        self._parent[child] = parent
        self._children.setdefault(parent, []).append(child)
        if self._is_coming(parent) and not has_prompt:
            self._awaited.setdefault(parent, []).append(child)
            self._table.hold[child] |= Hold.FORK

    def ready_parent(self, child: int) -> int | None:
        """Return the child's parent if its prompt is computed now."""
        parent = self._parent.get(child)
        return parent if parent is not None and self._is_ready(parent) else None

    def review(self) -> None:
        """Let the children go on whose parents' prompts are computed."""
        for parent in list(self._awaited) if self._awaited else ():
            if self._is_ready(parent):
                self.let_go(parent)

    def let_go(self, parent: int) -> None:
        """Let the children of a row go on: nothing is to be expected of it, or it is ready."""
        for child in self._awaited.pop(parent, ()):
            self._table.hold[child] &= ~Hold.FORK

    def forget(self, row: int) -> None:
        """Forget a row that ends."""
        self.let_go(row)
        for child in self._children.pop(row, ()):
            del self._parent[child]
        parent = self._parent.pop(row, None)
        if parent is not None:
            self._children[parent].remove(row)
            if not self._children[parent]:
                del self._children[parent]
            if row in self._awaited.get(parent, ()):
                self._awaited[parent].remove(row)
                if not self._awaited[parent]:
                    del self._awaited[parent]

    def check_invariants(self) -> None:
        """Check that only those wait who have something to wait for."""
        held = np.flatnonzero(self._table.hold & Hold.FORK).tolist()
        waiting = sorted(child for children in self._awaited.values() for child in children)
        assert waiting == held, "the bit FORK and the children that wait differ"
        assert all(self._parent[c] == p for p, children in self._awaited.items() for c in children), "a wrong parent"
        assert all(self._is_coming(parent) for parent in self._awaited), "a child waits for what will not come"
        links = sorted((child, parent) for parent, children in self._children.items() for child in children)
        assert links == sorted(self._parent.items()), "parents and children differ"
        assert (self._table.status[[row for link in links for row in link]] != Status.FREE).all(), "a link to nobody"

    def _is_ready(self, row: int) -> bool:
        return bool(self._table.num_computed[row] >= self._table.num_prompt[row])

    def _is_coming(self, row: int) -> bool:
        on_its_way = self._table.status[row] in (Status.WAITING, Status.RUNNING)
        return on_its_way and not self._table.hold[row] & Hold.NO_ROOM and not self._is_ready(row)
