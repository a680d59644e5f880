"""What moves to a group that forms, and how, as the system has it: the same for live and for modelled stages. Pure.

offers ──────────────────────────────────────────► table_to_form ──► KvTable
KvExchange ──► none_live | all_live | by_price ──────┘ are_live
               └─ facts of links and layers ──► kv_moves/exchange_mode.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.worker.contract.remote import SPLIT_KEYS
from services.worker.kv_moves.exchange_mode import LotWork, Pace, again_s, choose_live
from services.worker.kv_moves.kv_table import AreLive, KvOffer, KvTable, MovingKv, none_live, table_to_form
from services.worker.kv_moves.link_layers import link_layers
from shared.cost import CostModel
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


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """What the price of any exchange of one kind of workers depends on."""

    block_size: int
    """Tokens of a block."""
    block_bytes: int
    """Of a block's keys and values in one layer."""
    token_bytes: int
    """Of a token's queries and the states that come back, in one layer."""
    latency_s: float
    """Of a message between two stages."""
    limit_s: float
    """What has not come by then is computed again, unless something is live."""
    cost: CostModel | None
    """Of a step of the whole model; None: unknown, what does not come in time costs nothing then."""


def usable(exchange: KvExchange, block_size: int) -> KvExchange:
    """Return how KV can move: only blocks that make whole splits can be attended where they lie."""
    return KvExchange.COORDINATED if SPLIT_KEYS % block_size else exchange


def form_table(
    exchange: KvExchange, offers: Sequence[KvOffer], wanted: Sequence[LayerRange], costs: ExchangeCosts
) -> KvTable:
    """Return what moves when workers become a group, and how.

    Args:
        exchange: of the system, and usable.
        offers: by stage.
        wanted: by stage: layers after the change.
        costs: of each of them.
    """
    facts = ExchangeFacts(
        held=tuple(offer.layers for offer in offers),
        wanted=tuple(wanted),
        link_bytes_per_s=tuple(offer.link_bytes_per_s for offer in offers),
        latency_s=costs.latency_s,
        pace=Pace(
            max(offer.step_s for offer in offers), costs.limit_s, again_s(costs.cost, costs.block_size, len(offers))
        ),
        block_bytes=costs.block_bytes,
        token_bytes=costs.token_bytes,
    )
    return table_to_form(offers, wanted[-1].end, modes_of(exchange, facts))


def all_live(lots: Sequence[MovingKv]) -> Sequence[bool]:
    """Let all sequences go on."""
    return [True] * len(lots)


def modes_of(exchange: KvExchange, facts: ExchangeFacts) -> AreLive:
    """Return what chooses how lots move in a group of which these are the facts."""
    if exchange is KvExchange.COORDINATED:
        return none_live
    return all_live if exchange is KvExchange.LIVE else partial(by_price, facts)


def by_price(facts: ExchangeFacts, lots: Sequence[MovingKv]) -> Sequence[bool]:
    """Let those sequences go on for whom that is cheaper; see `kv_moves/exchange_mode.py`."""
    return choose_live([work_of(lot, facts) for lot in lots], facts.pace)


def work_of(lot: MovingKv, facts: ExchangeFacts) -> LotWork:
    """Return what a lot costs on each stage's link: layers that stay where they are cost nothing."""
    num_stages = len(facts.wanted)
    layers = link_layers(facts.held, facts.wanted, lot.sources, range(num_stages))
    sends, takes = layers.sends, layers.takes
    rates = np.array(facts.link_bytes_per_s)
    layer_s = np.divide(1.0, rates, out=np.zeros(num_stages), where=rates > 0)
    return LotWork(
        len(lot.kept),
        lot.kept.tails,
        lot.kept.ends,
        sends * facts.block_bytes * layer_s,
        takes * facts.block_bytes * layer_s,
        (sends + takes) * facts.token_bytes * layer_s,
        2 * facts.latency_s * layers.total,
        bool((rates[(sends + takes) > 0] > 0).all()),
    )
