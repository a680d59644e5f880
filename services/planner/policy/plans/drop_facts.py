"""What the planner knows when it forms and dissolves groups: the model, the instances, what a group of a size does.

An *instance* has one budget of pages; the parameters that it holds take some, KV the rest:

    pages:  | outer | layer 0 | layer 1 | ... | K of layer 0 | V of layer 0 | K of layer 1 | ... | spare |
            '---- each in whole pages -------'  '- as many for K as for V, in every layer ------'

A *group* is the instances that together hold one copy. Each serves one range of layers, as a stage of a pipeline; with
nothing dropped every instance is its own group.

Pure values. Source: KunServe v1, section 4.1 (buddy groups), v2, section 4.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import lt

from shared.ids import WorkerId
from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The model, as memory and as stages see it."""

    layer_bytes: tuple[int, ...]
    """Parameters of each layer, as its buffer takes them."""
    outer_bytes: int
    """Parameters outside the layers: one range of their own."""
    first_stage_end: int
    """The stage that has the first layer needs the outer bytes [0, first_stage_end): embedding, learned positions."""
    last_stage_begin: int
    """The stage that has the last layer needs the outer bytes [last_stage_begin, outer_bytes): last norm, head. A tied
    embedding is needed by both."""
    block_bytes: int
    """Keys (and as much again: values) of one block in one layer."""
    block_size: int
    """Tokens of one block."""
    page_bytes: int
    """Physical memory is mapped in pages of this size."""
    first_cost_layers: float = 0.0
    """Time of the embedding in a step, as a multiple of a layer's."""
    last_cost_layers: float = 0.0
    """The same of the last norm, the head and the sampling."""

    def __post_init__(self) -> None:
        if not self.layer_bytes or min(self.layer_bytes) < 1:
            raise ValueError("a model has layers, each of at least one byte")
        if min(self.block_bytes, self.block_size, self.page_bytes) < 1:
            raise ValueError("block_bytes, block_size and page_bytes are positive")
        if not 0 <= self.first_stage_end <= self.outer_bytes or not 0 <= self.last_stage_begin <= self.outer_bytes:
            raise ValueError("the outer parameters of the first and the last stage lie outside of them")
        if not (0 <= self.first_cost_layers < float("inf") and 0 <= self.last_cost_layers < float("inf")):
            raise ValueError("costs of the ends are finite and not negative")

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layer_bytes)

    @property
    def all_layers(self) -> LayerRange:
        """Every layer."""
        return LayerRange(0, self.num_layers)

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of one token in one layer."""
        return 2 * self.block_bytes / self.block_size


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """One instance that is alive and ready."""

    instance_id: WorkerId
    layers: LayerRange
    """Held physically now."""
    num_pages: int
    """Budget of parameters and KV together."""
    group_id: str = ""
    """Of the group that it is in now; empty: it is alone."""
    host: str = ""
    used_tokens: int = 0
    """KV that its sequences hold, tokens. A group's leader reports for the group, the other members report none. Of
    best effort that gives way no count has anything."""
    demanded_tokens: int = 0
    """KV that its queued requests need before they can run, tokens; as above."""
    growth_tokens: int = 0
    """KV by which its running requests will grow over the horizon of the plan, tokens."""
    tokens_per_s: float = 0.0
    """At which its running requests grow now."""
    max_request_tokens: int | None = None
    """Most KV that one request can have, by the length that the model is served with; None: unknown."""
    num_running: int = 0
    num_queued: int = 0
    throttled: bool = False
    """The monitor says that requests wait, or will within a second, for KV memory."""
    link_bytes_per_s: float = 0.0
    """Of its link to other instances, each way; 0: unknown, then nothing is known of what an exchange costs."""
    token_s: float = 0.0
    """Seconds in which it computes the KV of one token again, alone; 0: unknown, then that costs nothing."""
    host_copy: LayerRange | None = None
    """Layers whose parameters its host's memory holds too, with the outer parts of the ends that it covers."""
    max_blocks: int | None = None
    """Blocks for which addresses are reserved; None: enough for any plan."""
    num_blocks: int = 0
    """KV blocks that it hands out now; of a group's leader those of the group. 0: unknown."""
    resident: LayerRange | None = None
    """Layers whose parameters have memory, `layers` among them; None: just those, and it can load none beside."""
    loaded_ratio: float = 1.0
    """Share of the bytes of these parameters that are loaded."""
    is_leaving: bool = False
    """It is told to stop, and waits until its group is restored."""

    def __post_init__(self) -> None:
        if self.num_pages < 1:
            raise ValueError(f"instance {self.instance_id} has a budget of {self.num_pages} pages")
        counts = (self.used_tokens, self.demanded_tokens, self.growth_tokens, self.num_running, self.num_queued)
        if min(counts) < 0 or not 0 <= self.link_bytes_per_s < float("inf") or not 0 <= self.token_s < float("inf"):
            raise ValueError(f"instance {self.instance_id} has a negative count, link or time")
        if not 0 <= self.tokens_per_s < float("inf"):
            raise ValueError(f"instance {self.instance_id} generates {self.tokens_per_s} tokens per second")
        if self.resident is not None and not self.resident.covers(self.layers):
            raise ValueError(f"instance {self.instance_id} computes {self.layers} and has only {self.resident}")
        if not 0 <= self.loaded_ratio <= 1:
            raise ValueError(f"instance {self.instance_id} has loaded a share of {self.loaded_ratio}")

    @property
    def group(self) -> str:
        """Id of its group; its own while it is alone."""
        return self.group_id or self.instance_id

    @property
    def is_beside(self) -> bool:
        """Whether parameters are resident beside those of the layers that it computes."""
        return self.resident is not None and self.resident != self.layers

    @property
    def loaded(self) -> LayerRange:
        """Layers whose parameters are surely there."""
        return self.resident if self.resident is not None and self.loaded_ratio == 1.0 else self.layers


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All that a plan is made from."""

    model: ModelFacts
    instances: tuple[InstanceFacts, ...]
    """Of one model, sorted by id."""
    throughput: tuple[float, ...]
    """Profile: tokens per second of one group of s instances at index s - 1."""

    def __post_init__(self) -> None:
        ids = [instance.instance_id for instance in self.instances]
        if not all(map(lt, ids, ids[1:])):
            raise ValueError("instances are sorted by id, and each occurs once")
        if not self.throughput or min(self.throughput) <= 0:
            raise ValueError("the throughput of a group is positive, and known for groups of one")
        end = max((instance.layers.end for instance in self.instances), default=0)
        if end > self.model.num_layers:
            raise ValueError(f"an instance holds layers up to {end}, the model has {self.model.num_layers}")


class KvFate(StrEnum):
    """What becomes of the KV of running requests when their instance changes its role."""

    EXCHANGE = "exchange"  # each layer's part moves to the stage that has the layer now (v2, section 4.2)
    RECOMPUTE = "recompute"  # it is given up, and computed again from the tokens
    BY_LINK = "by-link"  # the first in a group of which a member says how fast its link is, else the second


@dataclass(frozen=True, slots=True)
class DropParams:
    """What a plan may do, and what its price is made of."""

    max_group_size: int = 8
    """Most instances of a group; larger frees more, and has more bubbles. The profile limits it too."""
    max_imbalance_ratio: float = 0.15
    """The slowest stage may take this much longer than with the most even ranges, where that makes room for more KV.
    Where a merge would gain nothing so, it may take as long as it does."""
    page_quantum: int = 1
    """Groups are chosen as if budgets were rounded down to a multiple of this. Higher plans faster where no two budgets
    are equal; what the plan claims is counted with the real ones all the same."""
    remap_s: float = 0.005
    """Stall of every running request while pages are mapped anew (5 ms: v2, section 4.1)."""
    hold_s: float = 30.0
    """Seconds that a group is expected to last; higher makes slow groups dearer."""
    kv: KvFate = KvFate.EXCHANGE
    """How running requests go on."""


def groups_of(facts: ClusterFacts) -> dict[str, list[InstanceFacts]]:
    """Return the members of every group, by its id, in the order of the facts; who is alone is a group of one."""
    groups: dict[str, list[InstanceFacts]] = {}
    for instance in facts.instances:
        groups.setdefault(instance.group, []).append(instance)
    return groups


def wanted_tokens(members: Sequence[InstanceFacts]) -> int:
    """Return the KV that the requests of these instances hold, or need before they can run, tokens."""
    return sum(member.used_tokens + member.demanded_tokens for member in members)


def expected_tokens(members: Sequence[InstanceFacts], horizon_s: float) -> int:
    """Return the KV that these requests want so many seconds ahead if none of them ends, tokens, rounded up."""
    return wanted_tokens(members) + math.ceil(horizon_s * sum(member.tokens_per_s for member in members))


def missing_layers(model: ModelFacts, members: Sequence[InstanceFacts]) -> LayerRange | None:
    """Return the first run of layers that none of the members holds, or None if together they hold a copy."""
    reached = 0
    for layers in sorted(member.layers for member in members):
        if layers.first > reached:
            return LayerRange(reached, layers.first)
        reached = max(reached, layers.end)
    return LayerRange(reached, model.num_layers) if reached < model.num_layers else None
