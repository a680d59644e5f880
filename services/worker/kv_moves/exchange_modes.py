"""How each lot of an exchange of KV moves, as the system has it: the same for live and for modelled stages. Pure.

KvExchange ──► none_live | all_live | by_price ──► AreLive of `kv_table.py`
└─ facts of links and layers ──► kv_moves/exchange_mode.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.worker.kv_moves.exchange_mode import LotWork, Pace, choose_live
from services.worker.kv_moves.kv_table import AreLive, MovingKv, none_live
from shared.layers import LayerRange
from shared.systems import KvExchange


@dataclass(frozen=True, slots=True)
class ExchangeFacts:
    """What the price of an exchange depends on, beside what moves."""

    held: tuple[LayerRange, ...]
    """By stage: layers before the change."""
    wanted: tuple[LayerRange, ...]
    """By stage: layers after it."""
    link_bytes_per_s: tuple[float, ...]
    """By stage, each way; 0: unknown."""
    latency_s: float
    """Of a message between two stages."""
    pace: Pace
    block_bytes: int
    """Of a block's keys and values in one layer."""
    token_bytes: int
    """Of a token's queries and the states that come back, in one layer."""


def all_live(lots: Sequence[MovingKv]) -> Sequence[bool]:
    """Let all sequences go on."""
    return [True] * len(lots)


def modes_of(exchange: KvExchange, facts: ExchangeFacts, *, can_attend: bool) -> AreLive:
    """Return what chooses how lots move.

    Args:
        exchange: of the system.
        facts: of the group.
        can_attend: blocks make whole splits, so that KV can be attended where it lies.
    """
    if not can_attend or exchange is KvExchange.COORDINATED:
        return none_live
    return all_live if exchange is KvExchange.LIVE else partial(by_price, facts)


def by_price(facts: ExchangeFacts, lots: Sequence[MovingKv]) -> Sequence[bool]:
    """Let those sequences go on for whom that is cheaper; see `kv_moves/exchange_mode.py`."""
    return choose_live([work_of(lot, facts) for lot in lots], facts.pace)


def work_of(lot: MovingKv, facts: ExchangeFacts) -> LotWork:
    """Return what a lot costs on each stage's link: layers that stay where they are cost nothing."""
    num_stages = len(facts.wanted)
    sends, takes = np.zeros(num_stages), np.zeros(num_stages)
    for source in lot.sources:
        for target, layers in enumerate(facts.wanted):
            part = facts.held[source].overlap(layers)
            if source != target and part is not None:
                sends[source] += len(part)
                takes[target] += len(part)
    rates = np.array(facts.link_bytes_per_s)
    layer_s = np.divide(1.0, rates, out=np.zeros(num_stages), where=rates > 0)
    return LotWork(
        len(lot.kept),
        lot.kept.tails,
        lot.kept.ends,
        sends * facts.block_bytes * layer_s,
        takes * facts.block_bytes * layer_s,
        (sends + takes) * facts.token_bytes * layer_s,
        2 * facts.latency_s * float(sends.sum()),
        bool((rates[(sends + takes) > 0] > 0).all()),
    )
