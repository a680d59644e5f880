"""Parameters that come back from several sources: whoever is lost or wrong is replaced, and nothing wrong is served."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from services.worker.executor import parameter_loading
from services.worker.executor.elastic_model import ElasticModel
from services.worker.executor.parameter_sources import SourceLostError
from services.worker.models.digests import digest, digests_of, wrong_parts
from services.worker.models.loader import copy_pieces
from services.worker.models.weights import ModelWeights, ParameterBuffer
from services.worker.peers.frames import FrameKind, FrameSocket
from services.worker.peers.greeting import PeerWelcome, read_greeting
from services.worker.peers.link_priority import LinkPriority
from services.worker.roles import parameter_lending
from services.worker.roles.parameter_lending import ParameterLender, PeerSource
from shared.errors import StartupError
from shared.layers import LayerRange
from tests.support.leaks import whats_open
from tests.support.live_groups import SHAPES, open_elastic_model
from tests.support.loading_gate import wait_until_loaded
from tests.support.processes import wait_until

FIRST, LAST, WHOLE = LayerRange(0, 2), LayerRange(2, 4), LayerRange(0, 4)
WELCOME = PeerWelcome(num_blocks=1, block_size=16)
PIECE = 700
"""Elements; a layer has more than ten such pieces."""


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_loading, "CPU_PIECE_ELEMENTS", PIECE)


@contextmanager
def opened(dtype: str = "float32") -> Iterator[ElasticModel]:
    model = open_elastic_model(SHAPES["llama"], dtype=dtype)
    try:
        yield model
    finally:
        model.close()


def bits_of(model: ElasticModel) -> dict[tuple[int | None, str], bytes]:
    return digests_of(model._opener.weights)


class Copies:
    """A source that has copies of some parts, which may be wrong, and may end before all of a part has come."""

    def __init__(self, weights: ModelWeights, layers: LayerRange, name: str) -> None:
        self.name = name
        self.asked: list[int | None] = []
        self.num_left = 10**9
        """Pieces until it is lost."""
        self.is_wrong = False
        self.is_closed = False
        self._layers = layers
        buffers = dict(enumerate(weights.layers))
        self._parts: dict[tuple[int | None, str], torch.Tensor] = {
            (layer, part.name): buffers[layer][part.name].reshape(-1).clone()
            for layer in layers
            for part in buffers[layer].parts
        }

    def has(self, layer: int | None, part: str) -> bool:
        return (layer, part) in self._parts

    def fill(self, layer: int | None, buffer: ParameterBuffer, piece_elements: int | None) -> Iterator[int]:
        assert not self.is_closed
        assert piece_elements == PIECE
        self.asked.append(layer)
        for part in buffer.parts:
            source, target = self._parts[layer, part.name], buffer[part.name].view(-1)
            for first in range(0, len(target), PIECE):
                if not self.num_left:
                    raise SourceLostError("made up: it is gone")
                self.num_left -= 1
                piece = target[first : first + PIECE]
                piece.copy_(source[first : first + PIECE])
                if self.is_wrong and first + PIECE >= len(target):
                    piece[-1] += 1
                yield piece.numel() * piece.itemsize

    def close(self) -> None:
        self.is_closed = True


@contextmanager
def lacking(
    *names: str, dtype: str = "float32"
) -> Iterator[tuple[ElasticModel, dict[tuple[int | None, str], bytes], list[Copies]]]:
    """A model that has kept two of its layers, its bits before that, and sources with copies of the others."""
    with opened(dtype=dtype) as model:
        bits, sources = bits_of(model), [Copies(model._opener.weights, LAST, name) for name in names]
        model.keep(FIRST)
        yield model, bits, sources


def load_beside(model: ElasticModel, before: list[Copies], after: list[Copies]) -> None:
    """Load all layers beside the first two, and wait until that is over."""
    blocks = model.blocks_with(model.layers, WHOLE)
    model.reside(WHOLE, blocks, before, after)
    wait_until_loaded(model)
    assert all(source.is_closed for source in (*before, *after))


def test_a_changed_bit_is_another_digest_wherever_it_is() -> None:
    rng = np.random.default_rng(0)
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.from_numpy(rng.standard_normal((37, 29))).to(dtype)
        seen = {digest(part)}
        flat = part.view(-1).view(torch.uint8)
        for at in rng.integers(0, len(flat), 50).tolist():
            bit = 1 << int(rng.integers(8))
            flat[at] ^= bit
            seen.add(digest(part))
            flat[at] ^= bit
        assert len(seen) > 45, "all but those that were drawn twice"
        assert digest(part) == digest(part.clone())


def test_wrong_parts_are_named() -> None:
    with opened() as model:
        weights = model._opener.weights
        digests = digests_of(weights)
        assert not any(wrong_parts(digests, layer, buffer) for layer, buffer in enumerate(weights.layers))
        assert not wrong_parts(digests, None, weights.outer)
        weights.layers[2]["down"].view(-1)[3] += 1
        assert wrong_parts(digests, 2, weights.layers[2]) == ["down"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_whoever_is_first_gives_what_it_has_and_the_next_one_the_rest(dtype: str) -> None:
    with lacking("first", "spare", dtype=dtype) as (model, bits, (source, spare)):
        model.open().close()
        load_beside(model, [source], [spare])
        assert (source.asked, spare.asked) == ([2, 3], []), "and what is outside of the layers from the checkpoint"
        load = model.load_now
        assert load is not None
        assert load.is_over
        assert load.num_loaded_bytes == load.num_bytes == sum(count for _, count in load.given)
        layers = sum(model._opener.weights.layers[layer].num_bytes for layer in LAST)
        assert dict(load.given)["first"] == layers
        assert set(dict(load.given)) <= {"first", "the checkpoint"}
        assert (model.loaded_ratio, bits_of(model)) == (1.0, bits)


@pytest.mark.parametrize("num_pieces", [0, 1, 13, 20])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_source_that_is_lost_halfway_or_wrong_is_replaced_by_the_next(num_pieces: int, is_wrong: bool) -> None:
    with lacking("bad", "good") as (model, bits, (bad, good)):
        bad.num_left, bad.is_wrong = num_pieces, is_wrong
        load_beside(model, [bad, good], [])
        assert good.asked[-1] == 3
        assert bad.asked == [2] if num_pieces < 2 else len(bad.asked) <= 2, "whoever is lost is not asked again"
        assert (model.loaded_ratio, bits_of(model)) == (1.0, bits)
        model.restore()
        assert model.load_now is None
        assert bits_of(model) == bits


def test_peers_have_what_the_checkpoint_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    with lacking("copies") as (model, bits, (copies,)):
        with monkeypatch.context() as patch:
            patch.setattr(parameter_loading, "copy_pieces", unreadable)
            load_beside(model, [], [copies])
            assert copies.asked, "in its place"
            assert model.loaded_ratio < 1, "what is outside of the layers nobody has"
            load = model.load_now
            assert load is not None
            assert load.is_over
            assert load.num_loaded_bytes < load.num_bytes
            assert load.num_loaded_bytes == sum(count for _, count in load.given)
            assert not set(copies.asked) & model._loading._lacking.keys()
        model.restore()
        assert bits_of(model) == bits


def unreadable(*_args: object) -> Iterator[tuple[str, int]]:
    raise StartupError("made up: the disk is gone", "Mend it")


def test_if_all_sources_are_wrong_nothing_counts_as_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with lacking("copies") as (model, bits, (copies,)):
        copies.is_wrong = True
        with monkeypatch.context() as patch:
            patch.setattr(parameter_loading, "copy_pieces", unreadable)
            load_beside(model, [copies], [])
            assert set(model._loading._lacking) >= {2, 3}
            with pytest.raises(StartupError, match="the disk is gone"):
                model.restore()
        model.restore()
        assert bits_of(model) == bits


def test_a_checkpoint_with_other_bytes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that look the same, and are not."""

    def spoiled(buffers: tuple[ParameterBuffer, ...], *args: object) -> Iterator[tuple[str, int]]:
        for said in copy_pieces(buffers, *args):  # type: ignore[arg-type]
            buffers[0].storage[5] ^= 1
            yield said
            buffers[0].storage[5] ^= 1
        buffers[0].storage[5] ^= 1

    with lacking() as (model, _, _):
        with monkeypatch.context() as patch:
            patch.setattr(parameter_loading, "copy_pieces", spoiled)
            with pytest.raises(StartupError, match="came with other bytes than were loaded first"):
                model.restore()
        model.restore()


def connect(lender: ParameterLender) -> socket.socket:
    """Return a connection that is welcome."""
    here, there = socket.socketpair()
    lender.welcome(there, WELCOME)
    assert read_greeting(bytes(FrameSocket(here).receive(FrameKind.GREETING).payload), PeerWelcome) == WELCOME
    return here


class NotedSource(PeerSource):
    """The last layers from a lender; each piece, by its number in its part, is noted when it has come."""

    def __init__(self, lender: ParameterLender, note: Callable[[int], None]) -> None:
        super().__init__("w1", connect(lender), LAST, ())
        self._note = note

    def fill(self, layer: int | None, buffer: ParameterBuffer, piece_elements: int | None) -> Iterator[int]:
        for number, piece in enumerate(super().fill(layer, buffer, piece_elements)):
            self._note(number)
            yield piece


def test_a_peer_lends_what_it_computes_with_and_nothing_else() -> None:
    before = whats_open()
    with opened() as model, lacking() as (other, bits, _):
        model.keep(LAST)
        lender = ParameterLender(model.lendable, LinkPriority())
        names = other.outer_names(LAST)
        assert "head" in names
        assert "embedding" not in names
        source = PeerSource("w1", connect(lender), LAST, names)
        assert [source.has(layer, "qkv") for layer in (0, 1, 2, 3)] == [False, False, True, True]
        assert [source.has(None, name) for name in ("head", "embedding")] == [True, False]
        blocks = other.blocks_with(FIRST, WHOLE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parameter_loading, "copy_pieces", unreadable)
            other.reside(WHOLE, blocks, [source])
            wait_until_loaded(other)
        assert (other.loaded_ratio, bits_of(other)) == (1.0, bits), "all that was lacking came from the peer"
        for layer, name in ((0, "qkv"), (None, "embedding"), (2, "nonsense"), (77, "qkv")):
            asking = PeerSource("w1", connect(lender), WHOLE, ("embedding",))
            with pytest.raises(SourceLostError, match="it has 0 bytes"):
                ask(asking, layer, name)
            asking.close()
        lender.close()
        lender.close()
    wait_until(lambda: whats_open() == before, "threads that have lent are over")


def ask(source: PeerSource, layer: int | None, name: str) -> None:
    """Ask for a part by itself."""

    class OnePart:
        num_bytes, dtype = 4, torch.float32
        parts = (type("Part", (), {"name": name})(),)

        def __getitem__(self, name: str) -> torch.Tensor:
            return torch.zeros(1)

    list(source.fill(layer, OnePart(), None))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_pieces", [0, 1, 5])
def test_a_lender_that_ends_lets_nobody_wait(num_pieces: int) -> None:
    with opened() as model, lacking() as (other, bits, _):
        lender = ParameterLender(model.lendable, LinkPriority())

        def note(number: int) -> None:
            if number == num_pieces:
                lender.close()

        source = NotedSource(lender, note)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parameter_lending, "PIECE_BYTES", 1024)
            other.reside(WHOLE, other.blocks_with(FIRST, WHOLE), [source])
            wait_until_loaded(other)
        assert (other.loaded_ratio, bits_of(other)) == (1.0, bits), "the checkpoint has the rest"
        assert not lender._lending
        late, there = socket.socketpair()
        lender.welcome(there, WELCOME)
        assert late.recv(1) == b"", "nobody is welcome any more"
        late.close()


def test_a_peer_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_lending, "SILENCE_S", 0.05)
    here, there = socket.socketpair()
    with there, lacking() as (model, bits, _):
        model.reside(WHOLE, model.blocks_with(FIRST, WHOLE), [PeerSource("w1", here, LAST, ())])
        wait_until_loaded(model)
        assert bits_of(model) == bits


def test_a_load_that_is_stopped_leaves_its_peer_and_begins_anew() -> None:
    with opened() as model, lacking() as (other, bits, _):
        lender = ParameterLender(model.lendable, LinkPriority())
        reached, go_on = threading.Event(), threading.Event()

        def note(_number: int) -> None:
            reached.set()
            go_on.wait(10)

        source = NotedSource(lender, note)
        other.reside(WHOLE, other.blocks_with(FIRST, WHOLE), [source])
        assert reached.wait(10)
        threading.Timer(0.02, go_on.set).start()
        other.reside(FIRST, other.blocks_with(FIRST))
        assert source._sock._sock.fileno() == -1, "nobody is left at this end"
        other.restore()
        assert bits_of(other) == bits
        lender.close()


def test_parameters_wait_for_what_is_urgent_and_not_for_ever() -> None:
    turns = LinkPriority()
    assert turns.wait(0)
    with turns.urgent(), turns.urgent():
        assert not turns.wait(0.01)
    assert turns.wait(0)
    woken = threading.Event()
    with turns.urgent():

        def wait() -> None:
            if turns.wait(10):
                woken.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not woken.wait(0.02)
    assert woken.wait(10)
    waiting.join()


def test_a_lender_sends_its_pieces_after_what_is_urgent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_lending, "YIELD_LIMIT_S", 30.0)
    with opened() as model:
        turns = LinkPriority()
        lender = ParameterLender(model.lendable, turns)
        sock = connect(lender)
        frames = FrameSocket(sock)
        with turns.urgent():
            frames.send(FrameKind.PARAMETER_ASK, b"down", words=(1, 0))
            num_bytes = frames.receive_head(FrameKind.PARAMETER).num_bytes
            assert num_bytes == model._opener.weights.layers[1]["down"].numel() * 4
            sock.settimeout(0.05)
            with pytest.raises(TimeoutError):
                sock.recv(1)
        sock.settimeout(10)
        assert sock.recv(1)
        (thread,) = lender._lending.values()
        lender.close()
        assert not thread.is_alive(), "nobody reads the parameters any more"
        sock.close()
