"""What one device brings to exchanges of KV, and how they are made: when a group forms, while it stands, when it parts.

a group forms       offer_to_form ─► to_form, with decide: by copies, live or coordinated
it stands, parts    offer_to_part ─► to_part
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.worker.attention.remote import STATE_EXTRA
from services.worker.contract.kept_kv import KeptKv
from services.worker.cost.estimate import CostEstimate
from services.worker.executor.elastic_model import ElasticModel
from services.worker.kv_moves.exchange_modes import ExchangeCosts, form_table, usable
from services.worker.kv_moves.kv_table import MAX_EXCHANGED, KvOffer, KvTable
from services.worker.kv_moves.kv_wire import KvSocket
from services.worker.kv_moves.places import GroupPlace
from services.worker.kv_moves.remote_attention import RemoteParts, RemoteShape
from services.worker.kv_moves.torch_exchange import TorchExchange
from services.worker.peers.frames import FrameSocket
from services.worker.peers.link_priority import LinkPriority
from shared.layers import LayerRange
from shared.systems import KvExchange

MESSAGE_S = 200e-6
"""Assumed of a message of remote attention between two stages, from thread to thread."""


@dataclass(frozen=True, slots=True)
class ExchangeParams:
    """How KV changes hands, and what that may take."""

    memory_bytes: int = 256 * 1024**2
    """Host memory for it, beside a chunk (4 MiB or a block) for each other stage; taken while it does. 0: all KV is
    computed again."""
    limit_s: float = 30.0
    """In which it has to at most, see `move_limit_s`; else KV is computed again."""
    bytes_per_s: float = 0.0
    """At which it does, as reported; 0: unknown."""
    mode: KvExchange = KvExchange.COORDINATED
    """How KV comes to a group that forms; the same for all of its stages."""
    hands_over: bool = False
    """Where all stages of a group that forms are on one device, KV is handed over in its pages."""

    @property
    def link_bytes_per_s(self) -> float:
        """Of this worker's link, each way; 0: unknown, or nothing is copied."""
        return self.bytes_per_s if self.memory_bytes else 0.0


class KvExchanges:
    """Of one device.

    Args:
        model: of the device.
        priority: of its connections.
        params: limits.
        cost: of a step.
    """

    def __init__(self, model: ElasticModel, priority: LinkPriority, params: ExchangeParams, cost: CostEstimate) -> None:
        self._model = model
        self._priority = priority
        self._params = params
        self._cost = cost
        self._mode = usable(params.mode, self._block_size)

    @property
    def limit_s(self) -> float:
        """In which KV has to change hands."""
        return self._params.limit_s

    @property
    def may_attend(self) -> bool:
        """KV that has not arrived may be attended where it lies."""
        return self._mode is not KvExchange.COORDINATED

    def most_copied(self, place: GroupPlace | None) -> int:
        """Return the blocks of one round of copies ahead: what the stage with most layers keeps aside."""
        stages = () if place is None else place.stages
        return min(self._room(max([len(self._held), *(len(stage.layers) for stage in stages)])), MAX_EXCHANGED)

    def offer_to_form(self, layers: LayerRange, group: str, kept: KeptKv, step_s: float) -> KvOffer:
        """Return what this device brings to a group that forms.

        Args:
            layers: that it will have.
            group: name of the group that it is in; empty: it is alone.
            kept: as in `KvOffer`.
            step_s: as there.
        """
        num_blocks = self._model.blocks_with(layers)
        room = self._room(len(self._held))
        link_bytes_per_s = self._params.link_bytes_per_s
        return KvOffer(
            *(self._held, room, num_blocks, group, kept, link_bytes_per_s, step_s), num_host_blocks=self._host_blocks
        )

    def offer_to_part(self, place: GroupPlace) -> KvOffer:
        """Return what this device brings when its group parts, or copies ahead."""
        ahead = self._model.ahead()
        num_blocks = self._model.info.capacity.num_blocks
        ahead_blocks = 0 if ahead is None else ahead.num_blocks
        room = self._room(len(self._held))
        return KvOffer(
            *(self._held, room, num_blocks, place.name), ahead_blocks=ahead_blocks, num_host_blocks=self._host_blocks
        )

    def to_form(
        self, place: GroupPlace, socks: Mapping[int, socket.socket], attention: Mapping[int, socket.socket]
    ) -> TorchExchange:
        """Return what moves KV to a group that forms, and attends it where it lies.

        Args:
            place: in the group.
            socks: by stage, for KV; owned by it.
            attention: by stage, for remote attention; none: there is none.
        """
        spec, remote = self._model.spec, None
        if attention:
            shape = RemoteShape(
                spec.num_heads, spec.head_dim, self._block_size, spec.num_layers, self._model.cache.keys[0].dtype
            )
            ends = {
                stage: FrameSocket(sock, is_checked=True, urgent=self._priority) for stage, sock in attention.items()
            }
            remote = RemoteParts(ends, shape, self._model.host_attention)
        return TorchExchange(
            place.index,
            {peer: KvSocket(sock) for peer, sock in socks.items()},
            [stage.layers for stage in place.stages],
            block_bytes=self._model.facts.block_bytes,
            limit_s=self.limit_s,
            bytes_per_s=self._params.link_bytes_per_s,
            remote=remote,
        )

    def to_part(self, place: GroupPlace, socks: dict[int, KvSocket], *, is_lasting: bool = False) -> TorchExchange:
        """Return what moves KV between the stages of a group to where each of them has all layers."""
        return TorchExchange(
            place.index,
            socks,
            [self._model.whole] * len(place.stages),
            block_bytes=self._model.facts.block_bytes,
            limit_s=self.limit_s,
            bytes_per_s=self._params.link_bytes_per_s,
            is_lasting=is_lasting,
        )

    def decide(self, place: GroupPlace, offers: Sequence[KvOffer]) -> KvTable:
        """Return what moves, by copies, when a group forms of which this stage is the leader."""
        return form_table(self._mode, offers, [stage.layers for stage in place.stages], self._costs)

    @property
    def _held(self) -> LayerRange:
        return self._model.layers

    @property
    def _host_blocks(self) -> int:
        return 0 if self._model.host is None else self._model.host.num_blocks

    @property
    def _block_size(self) -> int:
        return self._model.info.capacity.block_size

    def _room(self, num_layers: int) -> int:
        """Return of how many blocks so many layers may be kept aside."""
        return self._params.memory_bytes // (2 * self._model.facts.block_bytes * num_layers)

    @property
    def _costs(self) -> ExchangeCosts:
        spec = self._model.spec
        query_bytes = spec.num_heads * spec.head_dim * self._model.cache.keys[0].dtype.itemsize
        state_bytes = spec.num_heads * (spec.head_dim + STATE_EXTRA) * 4
        return ExchangeCosts(
            block_size=self._block_size,
            pair_bytes=2 * self._model.facts.block_bytes,
            token_bytes=query_bytes + state_bytes,
            latency_s=MESSAGE_S,
            limit_s=self.limit_s,
            cost=self._cost.now,
        )
