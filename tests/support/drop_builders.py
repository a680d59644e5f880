"""Clusters for drop plans, and a literal model of a worker's pages to hold the plans to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from services.planner.policy.plans.drop import plan_drop
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams, InstanceFacts, ModelFacts
from services.planner.policy.plans.drop_plan import DropPlan
from shared.ids import WorkerId
from shared.layers import LayerRange
from shared.messages.report import ElasticFacts

PROFILE = (1000.0, 1850.0, 2600.0, 3250.0, 3800.0, 4250.0, 4600.0, 4850.0)


def make_model(num_layers: int = 8, **fields: object) -> ModelFacts:
    """Equal layers of two pages each, no outer parts, blocks as large as a page."""
    common: dict[str, object] = {
        "layer_bytes": (2 * 64,) * num_layers,
        "outer_bytes": 0,
        "first_stage_end": 0,
        "last_stage_begin": 0,
        "block_bytes": 64,
        "block_size": 16,
        "page_bytes": 64,
    }
    return ModelFacts(**(common | fields))  # type: ignore[arg-type]


def make_elastic(model: ModelFacts | None = None, **fields: object) -> ElasticFacts:
    """What a worker reports of a model; without one, of 8 pages a layer: alone it has 10 blocks, with half of them 24.

    Of a model only what is reported is taken.
    """
    sizes = asdict(model or make_model(layer_bytes=(8 * 64,) * 8))
    return ElasticFacts.model_validate({"num_pages": 224, "max_blocks": 10_000, "has_host_copy": True} | sizes | fields)


def make_instance(number: int, first: int = 0, end: int = 8, *, pages: int = 64, **fields: Any) -> InstanceFacts:
    """An instance `w<number>` that holds these layers."""
    instance = InstanceFacts(WorkerId(f"w{number:05d}"), LayerRange(first, end), pages)
    return replace(instance, **fields)


def make_group(first_number: int, ends: Sequence[int], **fields: Any) -> list[InstanceFacts]:
    """A group whose stages end at these layers."""
    firsts = [0, *ends[:-1]]
    name = f"w{first_number:05d}"
    return [
        make_instance(first_number + i, first, end, group_id=name, **fields)
        for i, (first, end) in enumerate(zip(firsts, ends, strict=True))
    ]


def make_pair(name: str = "w0000", **leader: Any) -> list[InstanceFacts]:
    """Two stages of 4 of 8 layers: 3 blocks of 16 tokens each alone, 7 as a group.

    Args:
        name: they are `<name>0`, which leads, and `<name>1`.
        leader: fields of the first one.
    """
    first, second = make_group(0, (4, 8))
    names = [WorkerId(f"{name}{index}") for index in range(2)]
    return [
        replace(first, instance_id=names[0], group_id=names[0], **leader),
        replace(second, instance_id=names[1], group_id=names[0]),
    ]


def make_facts(
    instances: Sequence[InstanceFacts], model: ModelFacts | None = None, throughput: tuple[float, ...] = PROFILE
) -> ClusterFacts:
    """A cluster of these instances, whatever their order."""
    ordered = tuple(sorted(instances, key=lambda each: each.instance_id))
    return ClusterFacts(model or make_model(), ordered, throughput)


def carry_out(facts: ClusterFacts, plan: DropPlan) -> ClusterFacts:
    """Return the cluster after the plan: layers dropped, groups formed, the leaders with all that runs."""
    by_id = {instance.instance_id: instance for instance in facts.instances}
    for group in plan.groups:
        members = [by_id[stage.instance_id] for stage in group.stages]
        leader = members[0].instance_id
        for stage, member in zip(group.stages, members, strict=True):
            leads = stage.instance_id == leader
            by_id[stage.instance_id] = replace(
                member,
                layers=stage.layers,
                group_id=leader,
                used_tokens=sum(each.used_tokens for each in members) if leads else 0,
                num_running=sum(each.num_running for each in members) if leads else 0,
            )
    return make_facts(list(by_id.values()), facts.model, facts.throughput)


def random_model(rng: np.random.Generator) -> ModelFacts:
    """Sizes that fit nowhere: layers, outer parts and blocks that are no multiples of a page, nor of each other."""
    num_layers = int(rng.integers(2, 11))
    page_bytes = int(rng.choice([48, 64, 100]))
    outer_bytes = int(rng.integers(0, 5 * page_bytes))
    return ModelFacts(
        layer_bytes=tuple(rng.integers(page_bytes, 7 * page_bytes, num_layers).tolist()),
        outer_bytes=outer_bytes,
        first_stage_end=int(rng.integers(0, outer_bytes + 1)),
        last_stage_begin=int(rng.integers(0, outer_bytes + 1)),
        block_bytes=int(rng.choice([7, 30, 64])),
        block_size=int(rng.choice([1, 8, 16])),
        page_bytes=page_bytes,
        first_cost_layers=float(rng.choice([0.0, 0.25])),
        last_cost_layers=float(rng.choice([0.0, 1.5])),
    )


def random_facts(rng: np.random.Generator, num_drops: int = 2) -> ClusterFacts:
    """A cluster of up to nine instances, some of which have formed groups in earlier drops."""
    model = random_model(rng)
    least = pages_of(model, model.all_layers) + 2 * model.num_layers
    budget = int(rng.integers(least, 3 * least))
    budgets = [budget, budget + int(rng.integers(0, least // 4 + 1))]
    instances = [
        make_instance(
            number,
            end=model.num_layers,
            pages=int(rng.choice(budgets)),
            host=f"h{number // 3}",
            throttled=bool(rng.integers(2)),
            used_tokens=int(rng.integers(0, 50)),
            demanded_tokens=int(rng.integers(0, 50)),
            num_running=int(rng.integers(0, 9)),
            num_queued=int(rng.integers(0, 9)),
            link_bytes_per_s=float(rng.choice([0.0, 1e6])),
            host_copy=model.all_layers if rng.integers(2) else None,
            max_blocks=None if rng.integers(4) else int(rng.integers(20, 400)),
        )
        for number in range(int(rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])))
    ]
    facts = make_facts(instances, model)
    for _ in range(int(rng.integers(0, num_drops + 1))):
        plan = plan_drop(facts, DropParams(), int(rng.integers(1, 200)))
        if isinstance(plan, DropPlan):
            facts = carry_out(facts, plan)
    return facts


def pages_of(model: ModelFacts, layers: LayerRange) -> int:
    """Count the parameter pages of a stage byte range by byte range: a page is taken if any needed byte is in it."""
    page = model.page_bytes
    outer: dict[int, None] = {}
    if 0 in layers:
        outer |= dict.fromkeys(byte // page for byte in range(model.first_stage_end))
    if model.num_layers - 1 in layers:
        outer |= dict.fromkeys(byte // page for byte in range(model.last_stage_begin, model.outer_bytes))
    own = [{byte // page for byte in range(model.layer_bytes[layer])} for layer in range(layers.first, layers.end)]
    return len(outer) + sum(len(pages) for pages in own)


def literal_blocks(
    model: ModelFacts,
    layers: LayerRange,
    num_pages: int,
    max_blocks: int | None,
    resident: LayerRange | None = None,
) -> int:
    """Map pages one by one to the keys and values of each layer, and count the blocks that lie wholly in them."""
    free = num_pages - pages_of(model, resident or layers)
    sides = [0] * (2 * len(layers))
    while free >= len(sides):  # a page more for some of the sides only backs no block
        sides = [pages + 1 for pages in sides]
        free -= len(sides)
    blocks = []
    for pages in sides:
        count = 0
        while (count + 1) * model.block_bytes <= pages * model.page_bytes and count != max_blocks:
            count += 1
        blocks.append(count)
    return min(blocks)
