"""Remote attention of one stage: it asks others for what has not arrived here yet, and answers what they ask.

    the stage's thread                             another stage
    rows_of   which rows need what                 reader ──► queue ──► server thread: folds the keys that it kept aside
    ask       STEP (once a step), ASK ───────────►                                │
              rows whose keys are here meanwhile                                  │
    take      ◄──────────── reader ◄──────────────────────── ANSWER ◄─────────────┘

A reader never sends and the server waits for nobody, so stages that ask each other at the same time never wait in a
circle, whatever the order of their steps.

Keys that were kept aside stay until every stage has said that it asks no more (`finish`). If a connection ends before,
whoever needs what lay there fails its step with `RemoteLostError`, which ends the group.

Source: KunServe v1, section 4.2 (remote attention). Deviations: the source attends in its host's memory, where KV that
changes hands lies; arrived KV is attended locally.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch

from services.worker.attention.base import Attention, Fold, KeyRanges, RaggedRows
from services.worker.attention.remote import STATE_EXTRA, RemoteRows, new_states, remote_rows
from services.worker.contract.arrays import I32, I64, Bool
from services.worker.contract.remote import SPLIT_KEYS, RemoteLostError
from services.worker.kv_moves.kv_table import KvTable
from services.worker.kv_moves.remote_wire import REMOTE_KINDS, StepRows, pack_rows, unpack_rows
from services.worker.memory.block_copies import BlockCopies
from services.worker.memory.kv_cache import KVCache
from services.worker.peers.frames import Frame, FrameKind, FrameSocket, PeerLostError
from shared.errors import WireError
from shared.layers import LayerRange

SILENCE_S: Final = 30.0
"""Longest time that a step waits for an answer; then its source counts as lost."""

AttentionOver = Callable[[KVCache], Attention[Any]]
"""Returns an attention over keys and values in main memory."""


@dataclass(frozen=True, slots=True)
class RemoteShape:
    """Sizes of the model's attention, as both ends know them."""

    num_heads: int
    head_dim: int
    block_size: int
    num_layers: int
    dtype: torch.dtype
    """Of queries."""

    def read_ask(self, body: bytearray, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries and states of some tokens from the payload of an ask; raises `WireError`."""
        num_queries = num_tokens * self.num_heads * self.head_dim * self.dtype.itemsize
        num_states = num_tokens * self.num_heads * (self.head_dim + STATE_EXTRA) * 4
        if len(body) not in (num_queries, num_queries + num_states):
            raise WireError(f"{len(body)} bytes of queries and states of {num_tokens} tokens")
        queries = torch.frombuffer(body, dtype=self.dtype, count=num_queries // self.dtype.itemsize)
        queries = queries.view(num_tokens, self.num_heads, self.head_dim)
        if len(body) == num_queries:
            return queries, new_states(num_tokens, self.num_heads, self.head_dim)
        states = torch.frombuffer(body[num_queries:], dtype=torch.float32)
        return queries, states.view(num_tokens, self.num_heads, self.head_dim + STATE_EXTRA)


@dataclass(frozen=True, slots=True)
class RemoteParts:
    """What live lots need."""

    socks: Mapping[int, FrameSocket]
    """By stage, to all others; owned by who attends over them."""
    shape: RemoteShape
    attention_over: AttentionOver


class KeptKeys:
    """The KV of one lot as it was before the change, at one of its sources.

    Args:
        copies: of the lot's blocks, in its order.
        num_blocks: of the lot.
        parts: of its exchange.
    """

    def __init__(self, copies: BlockCopies, num_blocks: int, parts: RemoteParts) -> None:
        self.num_blocks = num_blocks
        self.layers = copies.layers
        """That it has."""
        self._block_size = parts.shape.block_size
        self._attention = parts.attention_over(copies.as_cache(parts.shape.num_layers))

    def plan(self, rows: StepRows) -> Fold:
        """Prepare what some rows need of it, in all layers."""
        split = SPLIT_KEYS // self._block_size
        width = int(rows.end.max(initial=0)) // self._block_size
        tables = np.zeros((len(rows.start), max(width, split)), dtype=np.int32)
        columns = np.arange(tables.shape[1]) * self._block_size
        tables[(columns >= rows.first[:, None]) & (columns < rows.end[:, None])] = rows.places
        return self._attention.plan_fold(
            KeyRanges(RaggedRows(rows.num_tokens, rows.start, tables), rows.first, rows.end)
        )


@dataclass(slots=True)
class _Part:
    """Rows of a step whose keys lie in one lot."""

    lot: int
    rows: StepRows
    tokens: torch.Tensor
    """[t] which of the tokens of the step's remote rows are theirs."""
    asked: dict[int, Fold | None] = field(default_factory=dict)
    """By source: who knows these rows; of this stage what it prepared."""


class _Peer:
    """The connection to one other stage, and what came over it."""

    def __init__(self, stage: int, sock: FrameSocket) -> None:
        self.stage = stage
        self.sock = sock
        self.answers: SimpleQueue[Frame | str] = SimpleQueue()
        """Or why there are no more."""
        self.is_done = False
        """It asks no more. Of the server."""
        self.plans: dict[int, tuple[int, Fold]] = {}
        """By lot, of its step: tokens, and what was prepared. Of the server."""


class RemoteAttention:
    """A `RemoteKeys` for one stage, and the other stages' source. Threads run from `begin` to `close`.

    Args:
        stage: this one.
        table: what moves.
        own: layers of this stage.
        copies: by lot: what this stage kept aside of it.
        parts: what else it takes; the connections are owned.
    """

    def __init__(
        self, stage: int, table: KvTable, own: LayerRange, copies: Mapping[int, BlockCopies], parts: RemoteParts
    ) -> None:
        self._stage = stage
        self._table = table
        self._kept = {
            index: KeptKeys(copies[index], len(lot.ids), parts)
            for index, lot in enumerate(table.lots)
            if lot.is_live and index in copies
        }
        self._shape = parts.shape
        self._peers = {index: _Peer(index, sock) for index, sock in parts.socks.items()}
        ends = [lot.first + len(lot.ids) for lot in table.lots]
        self._lot_first: I64 = np.array([lot.first for lot in table.lots], dtype=np.int64)
        self._is_missing: Bool = np.zeros(max(ends, default=0) + 1, dtype=np.bool_)
        for lot in table.lots:
            if stage in lot.targets and any(table.held[source].overlap(own) is not None for source in lot.sources):
                self._is_missing[lot.first : lot.first + len(lot.ids)] = True
        self._parts: tuple[_Part, ...] = ()
        self._waiting: list[tuple[_Peer, _Part, int]] = []
        self._states: torch.Tensor | None = None
        self._is_finished = False
        self.num_asked = 0
        """Layers of steps for which others were asked."""
        self._work: SimpleQueue[tuple[_Peer, Frame] | _Peer | None] = SimpleQueue()
        """What the server does: a frame; who asks no more; None: this stage does not."""
        self._threads = [
            threading.Thread(target=self._read, args=(peer,), name="remote attention", daemon=True)
            for peer in self._peers.values()
        ]
        self._server = threading.Thread(target=self._serve, name="remote attention server", daemon=True)

    def begin(self) -> None:
        """Listen to the others."""
        for thread in (*self._threads, self._server):
            thread.start()

    def landed(self, lot: int, count: int) -> None:
        """The first blocks of a lot are here, in all layers of this stage. In any thread."""
        first = self._table.lots[lot].first
        self._is_missing[first : first + count] = False

    def finish(self) -> None:
        """Ask no more: everything is here, or nobody uses what is not. In the stage's thread. Idempotent."""
        if self._is_finished:
            return
        self._is_finished = True
        self._parts, self._states = (), None  # what they were prepared over can go
        for peer in self._peers.values():
            with contextlib.suppress(PeerLostError):  # it has gone, and knows what it needs of that
                peer.sock.send(FrameKind.REMOTE_DONE)
        self._work.put(None)

    def shut(self) -> None:
        """End all connections: whoever waits, here or there, hears of it. Idempotent; from any thread."""
        for peer in self._peers.values():
            peer.sock.shut()

    def close(self) -> None:
        """End all connections, and wait for the threads. Idempotent; no step is under way."""
        self.shut()
        self._is_finished = True
        self._work.put(None)
        for thread in (*self._threads, self._server):
            thread.join()
        for peer in self._peers.values():
            peer.sock.close()

    # RemoteKeys: in the stage's thread

    def rows_of(self, rows: RaggedRows) -> RemoteRows | None:
        """Return which rows of a step need keys that are not here; see `RemoteKeys`."""
        if self._is_finished or not self._is_missing.any():
            return None
        size = self._shape.block_size
        width = min(int(-(-rows.start.max(initial=0) // size)), rows.tables.shape[1])
        ids = rows.tables[:, :width]
        assert ids.min(initial=0) >= 0, "rows of a group fill their blocks from the left"
        lacks = self._is_missing[np.minimum(ids, len(self._is_missing) - 1)]  # the last one is never missing
        lacks &= np.arange(width) * size < rows.start[:, None]
        if not lacks.any():
            return None
        needs = lacks.any(axis=1)
        first = np.where(needs, lacks.argmax(axis=1) * size // SPLIT_KEYS * SPLIT_KEYS, 0).astype(np.int32)
        last = (width - lacks[:, ::-1].argmax(axis=1)) * size
        end = np.where(needs, -(-last // SPLIT_KEYS) * SPLIT_KEYS, 0).astype(np.int32)
        if (end > rows.start)[needs].any():
            raise RemoteLostError("a sequence goes on that needs KV of a split which is not all here, nor elsewhere")
        found = remote_rows(rows, first, end)
        if found is not None:
            self._parts = tuple(self._split(found))
        return found

    def ask(self, rows: RemoteRows, layer: int, queries: torch.Tensor, states: torch.Tensor) -> None:
        """Send queries and states to where the keys are; see `RemoteKeys`."""
        del rows  # `rows_of` has cut them into parts
        self._states = states
        self.num_asked += 1
        for part in self._parts:
            source = self._source_of(part.lot, layer)
            if source == self._stage:
                self._fold_here(part, layer, queries, states)
                continue
            peer = self._peers[source]
            try:
                if source not in part.asked:
                    peer.sock.send(FrameKind.REMOTE_STEP, pack_rows(part.rows), words=(part.lot, 0))
                    part.asked[source] = None
                parts = [_bytes_of(queries[part.tokens])]
                if part.rows.first.any():  # else nothing is in the states yet
                    parts.append(_bytes_of(states[part.tokens]))
                peer.sock.send(FrameKind.REMOTE_ASK, *parts, words=(part.lot, layer))
            except PeerLostError as error:
                raise RemoteLostError(f"stage {source} is gone: {error}") from error
            self._waiting.append((peer, part, layer))

    def take(self) -> None:
        """Wait for the answers; see `RemoteKeys`."""
        waiting, self._waiting = self._waiting, []
        states = self._states
        assert states is not None, "nothing was asked"
        for peer, part, layer in waiting:
            answer = self._answer(peer)
            size = len(part.tokens) * self._shape.num_heads * (self._shape.head_dim + STATE_EXTRA) * 4
            if (answer.words, len(answer.payload)) != ((part.lot, layer), size):
                raise RemoteLostError(f"stage {peer.stage} answers what was not asked")
            given = torch.frombuffer(answer.payload, dtype=torch.float32)
            states[part.tokens] = given.view(len(part.tokens), *states.shape[1:])

    def _answer(self, peer: _Peer) -> Frame:
        try:
            found = peer.answers.get(timeout=SILENCE_S)
        except Exception as error:  # Empty
            raise RemoteLostError(f"stage {peer.stage} has not answered for {SILENCE_S:g} s") from error
        if isinstance(found, str):
            peer.answers.put(found)  # for whoever asks next
            raise RemoteLostError(f"stage {peer.stage} does not attend any more: {found}")
        return found

    def _split(self, found: RemoteRows) -> list[_Part]:
        """Cut rows by the lots that have their keys."""
        size, rows = self._shape.block_size, found.rows
        tokens_before = np.cumsum(rows.num_tokens) - rows.num_tokens
        by_lot: dict[int, list[tuple[int, I32]]] = {}
        for place in range(len(rows.start)):
            blocks = rows.tables[place, found.first[place] // size : found.end[place] // size].astype(np.int64)
            lots = np.searchsorted(self._lot_first, blocks, side="right") - 1
            lot = int(lots[0])
            if not self._table.lots[lot].is_live or (lots != lot).any() or blocks.max() >= len(self._is_missing) - 1:
                raise RemoteLostError("a sequence goes on with KV that is not here, and nobody attends")
            by_lot.setdefault(lot, []).append((place, (blocks - self._lot_first[lot]).astype(np.int32)))
        parts = []
        for lot, members in by_lot.items():
            chosen = np.array([place for place, _ in members], dtype=np.int64)
            step = StepRows(
                rows.num_tokens[chosen],
                rows.start[chosen],
                found.first[chosen],
                found.end[chosen],
                np.concatenate([places for _, places in members]),
            )
            tokens = np.concatenate(
                [np.arange(tokens_before[i], tokens_before[i] + rows.num_tokens[i], dtype=np.int64) for i in chosen]
            )
            parts.append(_Part(lot, step, torch.from_numpy(tokens)))
        return parts

    def _source_of(self, lot: int, layer: int) -> int:
        return next(source for source in self._table.lots[lot].sources if layer in self._table.held[source])

    def _fold_here(self, part: _Part, layer: int, queries: torch.Tensor, states: torch.Tensor) -> None:
        fold = part.asked.get(self._stage)
        if fold is None:
            fold = part.asked[self._stage] = self._kept[part.lot].plan(part.rows)
        mine = states[part.tokens]
        fold(layer, queries[part.tokens].cpu(), mine)
        states[part.tokens] = mine

    # The others' source

    def _read(self, peer: _Peer) -> None:
        """Body of a reader."""
        reason = "it has left"
        try:
            while True:
                frame = peer.sock.receive(*REMOTE_KINDS)
                if frame.kind is FrameKind.REMOTE_ANSWER:
                    peer.answers.put(frame)
                elif frame.kind is FrameKind.REMOTE_FAILED:
                    peer.answers.put(frame.payload.decode(errors="replace"))
                elif frame.kind is FrameKind.REMOTE_DONE:
                    self._work.put(peer)
                else:
                    self._work.put((peer, frame))
        except (PeerLostError, WireError) as error:
            reason = str(error)
        peer.sock.shut()
        peer.answers.put(reason)
        self._work.put(peer)

    def _serve(self) -> None:
        """Body of the server."""
        while not (self._is_finished and all(peer.is_done for peer in self._peers.values())):
            match self._work.get():
                case None:
                    pass
                case _Peer() as peer:
                    peer.is_done = True
                    peer.plans.clear()
                case (peer, frame):
                    self._answer_to(peer, frame)
        self._kept.clear()

    def _answer_to(self, peer: _Peer, frame: Frame) -> None:
        try:
            self._attend(peer, frame)
        except PeerLostError:  # the reader hears of it
            return
        except Exception as error:  # whatever torch or the wire comes up with: the other stage has to know
            with contextlib.suppress(PeerLostError):  # likewise
                peer.sock.send(FrameKind.REMOTE_FAILED, f"{type(error).__name__}: {error}".encode(), words=frame.words)

    def _attend(self, peer: _Peer, frame: Frame) -> None:
        lot, layer = frame.words
        kept = self._kept.get(lot)
        if kept is None:
            raise WireError(f"lot {lot} is not here")
        if frame.kind is FrameKind.REMOTE_STEP:
            rows = unpack_rows(frame.payload, self._shape.block_size, kept.num_blocks)
            peer.plans[lot] = int(rows.num_tokens.sum()), kept.plan(rows)
            return
        if layer not in kept.layers or lot not in peer.plans:
            raise WireError(f"layer {layer} is not among {kept.layers}, or no rows were named")
        num_tokens, fold = peer.plans[lot]
        queries, states = self._shape.read_ask(frame.payload, num_tokens)
        fold(layer, queries, states)
        peer.sock.send(FrameKind.REMOTE_ANSWER, _bytes_of(states), words=frame.words)


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of numbers, in main memory."""
    data: memoryview = values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
