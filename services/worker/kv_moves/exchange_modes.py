"""What moves to a group that forms, and how, as the system has it: the same for live and for modelled stages. Pure.

offers ──────────────────────────────────────────► table_to_form ──► KvTable
KvExchange ──► none_live | all_live | by_price ──────┘ are_live
               └─ facts of links and layers ──► kv_moves/exchange_price.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.worker.contract.remote import SPLIT_KEYS
from services.worker.kv_moves.exchange_price import LotWork, Pace, choose_live
from services.worker.kv_moves.kv_table import AreLive, KvOffer, KvTable, MovingKv, none_live, table_to_form
from services.worker.kv_moves.link_layers import link_layers
from shared.cost import CostModel
from shared.layers import LayerRange
from shared.systems import KvExchange


@dataclass(frozen=True, slots=True)
class ExchangeCosts:
    """What the price of any exchange of one kind of workers depends on."""

    block_size: int
    """Tokens of a block."""
    pair_bytes: int
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
    return table_to_form(offers, wanted[-1].end, modes_of(exchange, offers, wanted, costs))


def all_live(lots: Sequence[MovingKv]) -> Sequence[bool]:
    """Let all sequences go on."""
    return [True] * len(lots)


def modes_of(
    exchange: KvExchange, offers: Sequence[KvOffer], wanted: Sequence[LayerRange], costs: ExchangeCosts
) -> AreLive:
    """Return what chooses how lots move in a group that forms; as in `form_table`."""
    if exchange is KvExchange.COORDINATED:
        return none_live
    return all_live if exchange is KvExchange.LIVE else partial(by_price, offers, wanted, costs)


def by_price(
    offers: Sequence[KvOffer], wanted: Sequence[LayerRange], costs: ExchangeCosts, lots: Sequence[MovingKv]
) -> Sequence[bool]:
    """Let those sequences go on for whom that is cheaper; see `kv_moves/exchange_price.py`."""
    again_s = 0.0 if costs.cost is None else costs.cost.token_s * costs.block_size / len(offers)
    pace = Pace(max(offer.step_s for offer in offers), costs.limit_s, again_s)
    return choose_live([work_of(lot, offers, wanted, costs) for lot in lots], pace)


def work_of(lot: MovingKv, offers: Sequence[KvOffer], wanted: Sequence[LayerRange], costs: ExchangeCosts) -> LotWork:
    """Return what a lot costs on each stage's link: layers that stay where they are cost nothing."""
    layers = link_layers([offer.layers for offer in offers], wanted, lot.sources, range(len(offers)))
    used = layers.sends + layers.takes
    rates = np.array([offer.link_bytes_per_s for offer in offers])
    layer_s = np.divide(1.0, rates, out=np.zeros(len(offers)), where=rates > 0)
    return LotWork(
        len(lot.kept),
        lot.kept.tails,
        lot.kept.ends,
        layers.sends * costs.pair_bytes * layer_s,
        layers.takes * costs.pair_bytes * layer_s,
        used * costs.token_bytes * layer_s,
        2 * costs.latency_s * layers.total,
        bool((rates[used > 0] > 0).all()),
    )
