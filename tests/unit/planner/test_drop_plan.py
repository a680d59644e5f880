"""Drop plans: what they claim is so, what they must not do they refuse, and greedy is the optimum where it must be."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.planner.policy.plans.drop import DropStrategy, plan_drop, tokens_short
from services.planner.policy.plans.drop_facts import (
    ClusterFacts,
    DropParams,
    InstanceFacts,
    KvFate,
    groups_of,
    missing_layers,
)
from services.planner.policy.plans.drop_plan import DropPlan, DropRefusal, RefusalKind
from services.planner.policy.plans.greedy import merge_smallest
from services.planner.policy.plans.merging import Merger, fewest_host_copies
from services.planner.policy.plans.tiling import TilingSearch
from shared.layers import LayerRange
from tests.support.drop_builders import (
    PROFILE,
    carry_out,
    literal_blocks,
    make_facts,
    make_group,
    make_instance,
    make_model,
    random_facts,
)
from tests.support.kinds import of_kind
from tests.support.seeds import first_of

SEEDS = range(60)


def plan_of(facts: ClusterFacts, required: int, params: DropParams | None = None, **fields: Any) -> DropPlan:
    plan = of_kind(DropPlan, plan_drop(facts, params or DropParams(), required, **fields))
    plan.check_invariants(facts)
    return plan


def refusal_of(facts: ClusterFacts, required: int = 1, **fields: Any) -> DropRefusal:
    return of_kind(DropRefusal, plan_drop(facts, DropParams(**fields), required))


def literal_tokens(facts: ClusterFacts, members: list[InstanceFacts]) -> int:
    model = facts.model
    blocks = [literal_blocks(model, each.layers, each.num_pages, each.max_blocks) for each in members]
    return min(blocks) * model.block_size


@pytest.mark.parametrize("strategy", list(DropStrategy))
@pytest.mark.parametrize("seed", first_of(SEEDS, 20))
def test_what_a_plan_claims_is_what_pages_mapped_one_by_one_give(seed: int, strategy: DropStrategy) -> None:
    """Each part of the claim is counted anew: ranges, room before and after, the gain, what v1's objective says."""
    rng = np.random.default_rng(seed)
    facts = random_facts(rng)
    params, required = DropParams(page_quantum=int(rng.choice([1, 1, 8]))), int(rng.integers(1, 400))
    plan = plan_drop(facts, params, required, strategy)
    assert plan == plan_drop(random_facts(np.random.default_rng(seed)), params, required, strategy), "the same again"
    if isinstance(plan, DropRefusal):
        return
    plan.check_invariants(facts)
    before, after = groups_of(facts), groups_of(carry_out(facts, plan))
    held = {instance.instance_id: instance for instance in facts.instances}
    gained = 0
    for group in plan.groups:
        covered = [layer for stage in group.stages for layer in range(stage.layers.first, stage.layers.end)]
        assert covered == list(range(facts.model.num_layers))
        assert all(held[stage.instance_id].layers.covers(stage.layers) for stage in group.stages)
        names = dict.fromkeys(held[stage.instance_id].group for stage in group.stages)
        assert sum(len(before[name]) for name in names) == len(group.stages)  # groups merge whole
        assert group.before_tokens == sum(literal_tokens(facts, before[name]) for name in names)
        assert group.after_tokens == literal_tokens(facts, after[group.stages[0].instance_id])
        assert group.after_tokens > group.before_tokens
        gained += group.after_tokens - group.before_tokens
    assert plan.gained_tokens == gained
    speed = sum(PROFILE[len(members) - 1] for members in after.values())
    assert plan.slowdown == pytest.approx(len(facts.instances) * PROFILE[0] / speed)
    assert ("not satisfiable" in plan.reason) == (gained < plan.required_tokens)


def test_the_random_clusters_are_worth_their_name() -> None:
    """The properties above hold of no plan at all: most seeds must give one, some from groups that were there."""
    plans = []
    for seed in SEEDS:
        facts = random_facts(np.random.default_rng(seed))
        plan = plan_drop(facts, DropParams(), 300)
        if isinstance(plan, DropPlan):
            plans.append(any(stage.held != facts.model.all_layers for group in plan.groups for stage in group.stages))
    assert len(plans) > 30
    assert sum(plans) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_every_layer_keeps_a_second_copy(seed: int) -> None:
    facts = random_facts(np.random.default_rng(seed))
    plan = plan_drop(facts, DropParams(), 10**6)
    if isinstance(plan, DropRefusal):
        return
    after = carry_out(facts, plan)
    for layer in range(facts.model.num_layers):
        in_groups = sum(layer in instance.layers for instance in after.instances)
        hosts = dict.fromkeys(each.host for each in after.instances if each.host_copy and layer in each.host_copy)
        assert in_groups + len(hosts) >= 2


@pytest.mark.parametrize("seed", SEEDS)
def test_more_is_gained_where_more_is_required_and_no_merge_too_many_is_done(seed: int) -> None:
    facts = random_facts(np.random.default_rng(seed))
    plans = [plan_drop(facts, DropParams(), required) for required in (20, 60, 180, 540, 10**6)]
    made = [plan for plan in plans if isinstance(plan, DropPlan)]
    assert len(made) in (0, len(plans))
    for less, more in pairwise(made):
        assert (less.gained_tokens, less.slowdown) <= (more.gained_tokens, more.slowdown + 1e-12)
        assert less.is_satisfied or less.groups == more.groups
    for plan in made:
        assert plan_of(facts, plan.gained_tokens).groups == plan.groups


def large(num_instances: int) -> ClusterFacts:
    """60 layers of 2 pages, 240 pages: a group of s has s·240/120 - 1 blocks of 16 tokens, so a merge gains 16."""
    model = make_model(60)
    whole = [make_instance(number, end=60, pages=240, host_copy=model.all_layers) for number in range(num_instances)]
    return make_facts(whole, model)


def algorithm_1(num_instances: int, worth: int, required: int) -> Counter[int]:
    """KunServe v1, Algorithm 1, to the letter: sizes of the groups at the end."""
    queue = [1] * num_instances
    heapq.heapify(queue)
    while len(queue) > 1 and sum((size - 1) * worth for size in queue) < required:
        heapq.heappush(queue, heapq.heappop(queue) + heapq.heappop(queue))
    return Counter(queue)


@pytest.mark.parametrize("num_instances", range(2, 7))
def test_groups_are_those_of_the_paper_where_every_merge_is_worth_one_p(num_instances: int) -> None:
    facts = large(num_instances)
    for required in range(1, 16 * num_instances + 1, 5):
        plan = plan_of(facts, required)
        sizes = Counter(len(group.stages) for group in plan.groups)
        sizes[1] += num_instances - sum(size * count for size, count in sizes.items())
        assert +sizes == algorithm_1(num_instances, 16, required)


def test_a_size_that_cannot_be_cut_evenly_gains_less_and_the_smallest_merge_all_the_same() -> None:
    """7 stages of 60 layers: the longest has 9, and 7 · 240 / 120 - 1 = 13 blocks would need 60 / 7."""
    plan = plan_of(large(7), 16 * 6)
    assert [len(group.stages) for group in plan.groups] in ([4], [4, 3], [3, 4])
    assert not plan.is_satisfied
    assert "nothing would be gained" in plan.reason


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    num_instances=st.integers(2, 7),
    steps=st.lists(st.floats(0.05, 1.0), min_size=6, max_size=6),
    share=st.floats(0.001, 1.0),
)
def test_greedy_is_the_optimum_up_to_pairs_under_concave_profiles(
    num_instances: int, steps: list[float], share: float
) -> None:
    """Concave: each further instance adds less. Then a lone merge costs least, and pairs are the cheapest k merges."""
    profile = tuple(np.cumsum([1.0, *sorted(steps, reverse=True)]).tolist())
    facts = replace(large(num_instances), throughput=profile)
    required = max(1, int(share * 16 * (num_instances // 2)))
    greedy, best = plan_of(facts, required), plan_of(facts, required, strategy=DropStrategy.OPTIMUM)
    assert greedy.is_satisfied
    assert best.is_satisfied
    assert greedy.slowdown == pytest.approx(best.slowdown)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_costs_less_than_the_optimum(seed: int) -> None:
    facts = random_facts(np.random.default_rng(seed))
    greedy = plan_drop(facts, DropParams(), 100)
    best = plan_drop(facts, DropParams(), 100, DropStrategy.OPTIMUM)
    if isinstance(greedy, DropRefusal):
        return
    assert isinstance(best, DropPlan)
    assert best.is_satisfied or not greedy.is_satisfied
    if greedy.is_satisfied:
        assert best.slowdown <= greedy.slowdown + 1e-12


def test_the_optimum_is_refused_where_it_would_take_too_long() -> None:
    facts = make_facts([make_instance(number) for number in range(10)])
    with pytest.raises(ValueError, match="at most 9 groups"):
        plan_drop(facts, DropParams(), 1, DropStrategy.OPTIMUM)


def test_memory_greedy_grows_one_group_until_the_gain_exceeds_all_kv() -> None:
    """Alone an instance has 1 block of 16 tokens, and a merge gains one: 10 merges would exceed what 10 had by none."""
    facts, params = large(10), DropParams(max_group_size=6)
    plan = plan_of(facts, 1, params, strategy=DropStrategy.MEMORY_GREEDY)
    assert [len(group.stages) for group in plan.groups] == [6, 4]
    assert [len(group.stages) for group in plan_of(facts, 1, params).groups] == [2]
    tight = make_facts([replace(each, num_pages=180) for each in facts.instances], replace(facts.model, block_bytes=32))
    plan = plan_of(tight, 1, params, strategy=DropStrategy.MEMORY_GREEDY)
    assert plan.gained_tokens > sum(group.before_tokens for group in plan.groups)


def test_throttled_instances_merge_first_then_those_of_one_host_then_by_id() -> None:
    hosts = ["a", "a", "a", "b", "b", "b", "c", "c"]
    throttled = {5, 7}
    facts = make_facts(
        [make_instance(number, host=host, throttled=number in throttled) for number, host in enumerate(hosts)]
    )
    pairs = [[int(stage.instance_id[1:]) for stage in group.stages] for group in plan_of(facts, 4 * 16).groups]
    assert pairs == [[5, 7], [0, 1], [2, 6], [3, 4]]
    first = plan_of(facts, 1)
    assert [stage.instance_id for stage in first.groups[0].stages] == ["w00005", "w00007"]
    second = plan_of(facts, 17)
    assert [stage.instance_id for stage in second.groups[1].stages] == ["w00000", "w00001"]


def test_one_host_goes_before_a_throttled_one_alone_only_among_equals() -> None:
    """A throttled instance without a throttled partner takes the calm one on its host, not the first by id."""
    facts = make_facts([make_instance(number, host=host, throttled=number == 2) for number, host in enumerate("abbc")])
    assert [stage.instance_id for stage in plan_of(facts, 1).groups[0].stages] == ["w00001", "w00002"]


def test_a_merge_that_loses_is_refused() -> None:
    """Three stages of 16 of 48 layers and a whole instance: one of 16 stays, and the single one's own room is lost."""
    model = make_model(48, layer_bytes=(12 * 64,) * 48)
    facts = make_facts(
        [*make_group(0, (16, 32, 48), pages=1440), make_instance(9, end=48, pages=1440, host_copy=model.all_layers)],
        model,
    )
    refusal = refusal_of(facts, 16)
    assert refusal.kind is RefusalKind.NO_GAIN
    assert "nothing would be gained" in refusal.reason


def test_where_a_pair_loses_another_pair_is_tried() -> None:
    """The whole instance has no partner; the two groups of three have each other."""
    model = make_model(48, layer_bytes=(12 * 64,) * 48)
    groups = make_group(0, (16, 32, 48), pages=1440) + make_group(4, (16, 32, 48), pages=1440)
    lonely = make_instance(8, end=48, pages=1440, host_copy=model.all_layers)
    plan = plan_of(make_facts([*groups, lonely], model), 16)
    assert [len(group.stages) for group in plan.groups] == [6]
    assert plan.is_satisfied


def test_where_ranges_do_not_exist_another_pair_is_tried() -> None:
    """Groups of 1 + 6 cannot share their first layer. A whole instance can join one: (77 - 14) / 14 = 4 and
    (77 - 12) / 12 = 5 blocks become (77 - 6) / 6 = 11."""
    copy: dict[str, Any] = {"host_copy": LayerRange(0, 7), "pages": 77}
    groups = make_group(0, (1, 7), **copy) + make_group(2, (1, 7), **copy)
    facts = make_facts(groups, make_model(7))
    assert refusal_of(facts).kind is RefusalKind.NO_RANGES
    plan = plan_of(make_facts([*groups, make_instance(5, end=7, **copy)], make_model(7)), 1)
    assert [[str(stage.layers) for stage in group.stages] for group in plan.groups] == [["[0, 1)", "[1, 4)", "[4, 7)"]]


def test_instances_of_different_budgets_merge_where_equal_ones_are_not_to_be_had() -> None:
    """(64 - 16) / 16 = 3 blocks, (66 - 16) / 16 = 3 and (80 - 16) / 16 = 4; the pair of the first two has 7."""
    different = [make_instance(number, pages=pages) for number, pages in enumerate((64, 66, 80))]
    plan = plan_of(make_facts(different), 1)
    assert [sorted(stage.instance_id for stage in group.stages) for group in plan.groups] == [["w00000", "w00001"]]


def test_the_last_two_copies_are_kept_unless_host_memory_has_one() -> None:
    pair = [make_instance(0), make_instance(1)]
    refusal = refusal_of(make_facts(pair))
    assert refusal.kind is RefusalKind.NO_SECOND_COPY
    assert "without a second copy" in refusal.reason
    partly = replace(pair[0], host_copy=LayerRange(0, 7))
    assert refusal_of(make_facts([partly, pair[1]])).kind is RefusalKind.NO_SECOND_COPY
    rest = replace(pair[1], host="other", host_copy=LayerRange(7, 8))
    assert plan_of(make_facts([partly, rest]), 1).is_satisfied
    with_peer = plan_of(make_facts([*pair, make_instance(2)]), 10**6)
    assert [len(group.stages) for group in with_peer.groups] == [2]
    assert "without a second copy" in with_peer.reason


def test_groups_are_no_larger_than_allowed_or_profiled() -> None:
    whole = [make_instance(number) for number in range(8)]
    assert refusal_of(make_facts(whole), max_group_size=1).kind is RefusalKind.NO_PARTNER
    plan = plan_of(make_facts(whole, throughput=PROFILE[:3]), 10**6)
    assert max(len(group.stages) for group in plan.groups) == 2  # 2 + 2 would be 4, and 3 does not come of pairs
    assert "no larger group is allowed" in plan.reason


def test_a_group_that_lost_a_member_is_left_alone() -> None:
    broken = make_group(0, (4, 8))[:1]
    whole = [make_instance(number) for number in range(3, 6)]
    assert missing_layers(make_model(), broken) == LayerRange(4, 8)
    plan = plan_of(make_facts([*broken, *whole]), 10**6)
    assert "w00000" not in [stage.instance_id for group in plan.groups for stage in group.stages]
    refusal = refusal_of(make_facts(broken))
    assert refusal.kind is RefusalKind.NO_PARTNER
    short = [replace(each, demanded_tokens=99, throttled=True) for each in broken]
    assert tokens_short(make_facts(short)) == 0
    assert refusal_of(make_facts([])).kind is RefusalKind.NO_PARTNER


def test_layers_that_several_members_hold_are_not_missing() -> None:
    inner, outer = make_instance(1, 2, 4), make_instance(0)
    assert missing_layers(make_model(), [inner, outer]) is None
    assert missing_layers(make_model(), [inner, make_instance(2, 0, 6)]) == LayerRange(6, 8)
    assert missing_layers(make_model(), [inner, make_instance(2, 4, 8)]) == LayerRange(0, 2)


def test_nothing_is_planned_where_nothing_is_short() -> None:
    assert refusal_of(make_facts([make_instance(0), make_instance(1)]), 0).kind is RefusalKind.NOT_NEEDED


def test_what_is_short_is_all_that_throttled_groups_ask_for_less_what_is_free_there() -> None:
    """Three instances with 3 blocks of 16 tokens, 48 each. The first asks for 40 + 20 + 5, the second for 30 + 70, but
    not for want of memory; the third has room: it asks for a block if somebody waits."""
    first = make_instance(0, used_tokens=40, demanded_tokens=20, growth_tokens=5, throttled=True)
    second = make_instance(1, used_tokens=30, demanded_tokens=70)
    third = make_instance(2, used_tokens=40, throttled=True)
    assert tokens_short(make_facts([first, second])) == 65 - 48
    assert tokens_short(make_facts([first, replace(second, throttled=True)])) == 17 + 52
    assert tokens_short(make_facts([second, third])) == 0
    assert tokens_short(make_facts([second, replace(third, num_queued=1)])) == 16
    assert tokens_short(make_facts([second])) == 0


def test_what_a_group_is_short_of_is_counted_as_the_group_has_it() -> None:
    """Two stages of 4 of 8 layers: 64 pages less 8, in 8 sides: 7 blocks of 16 tokens."""
    pair = make_group(0, (4, 8))
    pair[0] = replace(pair[0], used_tokens=100, demanded_tokens=20, throttled=True)
    assert tokens_short(make_facts(pair)) == max(120 - 7 * 16, 0)
    pair[0] = replace(pair[0], demanded_tokens=60)
    assert tokens_short(make_facts(pair)) == 160 - 7 * 16


def test_the_price_is_stalls_of_the_exchange_and_of_slower_steps() -> None:
    """KV of a token in a layer: 2 · 64 / 16 = 8 bytes. Of 40 and 30 tokens the sides send 4 of 8 layers: 1 280 and 960
    bytes; at 100 bytes/s T = 12.8 s. Of 3 requests the k-th waits T · k / 3: 2 T in all. Steps: a pair
    does 1 850 instead of 2 000 tokens/s, for 30 s and 3 + 2 requests."""
    copy = LayerRange(0, 8)
    first = make_instance(0, used_tokens=40, num_running=2, num_queued=2, link_bytes_per_s=100.0, host_copy=copy)
    second = make_instance(1, used_tokens=30, num_running=1, link_bytes_per_s=100.0)
    plan = plan_of(make_facts([first, second]), 1)
    assert plan.groups[0].exchange_s == pytest.approx(12.8)
    assert plan.price.remap_s == pytest.approx(3 * 0.005)
    assert plan.price.exchange_s == pytest.approx(2 * 12.8)
    assert plan.price.slower_s == pytest.approx(5 * 30 * (1 - 1850 / 2000))
    assert plan.groups[0].price_s == pytest.approx(plan.price.total_s)


def test_kv_is_priced_by_links_where_somebody_says_how_fast_his_is_else_by_the_time_of_its_tokens() -> None:
    """70 tokens, at 0.1 s each on the slower member; a pair computes 1 850 tokens where one computes 1 000. Of 3
    requests the k-th waits T · k / 3: 2 T in all. Over links T is 12.8 s, as above."""
    copy = LayerRange(0, 8)
    first = make_instance(0, used_tokens=40, num_running=2, link_bytes_per_s=100.0, token_s=0.1, host_copy=copy)
    second = make_instance(1, used_tokens=30, num_running=1, token_s=0.04)
    mute = replace(first, link_bytes_per_s=0.0)
    again_s = 7 / 1.85
    for kv, one, expected_s in (
        (KvFate.EXCHANGE, first, 12.8),
        (KvFate.BY_LINK, first, 12.8),
        (KvFate.RECOMPUTE, first, again_s),
        (KvFate.RECOMPUTE, mute, again_s),
        (KvFate.BY_LINK, mute, again_s),
    ):
        plan = plan_of(make_facts([one, second]), 1, DropParams(kv=kv))
        assert plan.groups[0].exchange_s == pytest.approx(expected_s)
        assert plan.price.exchange_s == pytest.approx(2 * expected_s)


def test_kv_of_a_group_is_exchanged_from_where_its_stages_have_it() -> None:
    """A pair with 70 tokens and a single with 30 become three stages of 4 of 12 layers: (96 - 8) / 8 = 11 blocks, more
    than 7 + 3. The single sends 30 · 8 and gets 70 · 4 tokens' layers of 8 bytes: 280 · 8 bytes at 100 bytes/s. Of the
    pair's links nothing is known, so they cost nothing."""
    copy = LayerRange(0, 12)
    pair = make_group(0, (6, 12), pages=96, host_copy=copy)
    pair[0] = replace(pair[0], used_tokens=70)
    single = make_instance(5, end=12, pages=96, used_tokens=30, link_bytes_per_s=100.0)
    plan = plan_of(make_facts([*pair, single], make_model(12)), 1)
    assert [len(stage.layers) for stage in plan.groups[0].stages] == [4, 4, 4]
    assert plan.groups[0].exchange_s == pytest.approx(22.4)
    assert plan.price.exchange_s == 0  # nobody runs, so nobody waits


def test_a_plan_that_costs_more_than_it_is_worth_is_refused() -> None:
    busy = [make_instance(number, num_running=10) for number in range(3)]
    price_s = plan_of(make_facts(busy), 1).price.total_s
    assert price_s > 0
    dear = of_kind(DropRefusal, plan_drop(make_facts(busy), DropParams(), 1, worth_s=price_s * 0.99))
    assert dear.kind is RefusalKind.NOT_WORTH_IT
    assert isinstance(plan_drop(make_facts(busy), DropParams(), 1, worth_s=price_s), DropPlan)


def counted(call: Callable[..., Any], done: Counter[str]) -> Callable[..., Any]:
    """The same, counted under its name."""

    def counting(*args: Any) -> Any:
        done[call.__name__] += 1
        return call(*args)

    return counting


@pytest.mark.parametrize("num_kinds", [1, 3])
def test_work_grows_with_the_kinds_of_groups_not_with_their_number(
    num_kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, done = [], Counter[str]()
    for owner, name in ((TilingSearch, "find"), (Merger, "union")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name), done))
    for num_instances in (100, 2000):
        whole = [
            make_instance(number, end=24, pages=300 + 20 * (number % num_kinds), host=f"h{number // 8:04d}")
            for number in range(num_instances)
        ]
        facts = make_facts(whole, make_model(24))
        merger = Merger(facts, DropParams(), 10**9)
        done.clear()
        merge_smallest(merger)
        assert merger.num_groups < num_instances / 3
        counts.append((done["find"], done["union"]))
    assert counts[1][0] <= counts[0][0] + 20
    assert counts[1][1] <= counts[0][1] * 2 + 50


MODEL = partial(make_model, outer_bytes=100, last_stage_begin=100)
INSTANCE = partial(make_instance, 0)
FACTS = partial(replace, make_facts([make_instance(0)]))


@pytest.mark.parametrize(
    ("made", "fields", "message"),
    [
        (FACTS, {"instances": (make_instance(1), make_instance(0))}, "sorted by id"),
        (FACTS, {"instances": (make_instance(1), make_instance(1))}, "each occurs once"),
        (FACTS, {"instances": (make_instance(0, 0, 9),)}, "the model has 8"),
        (FACTS, {"throughput": ()}, "throughput"),
        (FACTS, {"throughput": (1.0, 0.0)}, "throughput"),
        (MODEL, {"layer_bytes": ()}, "a model has layers"),
        (MODEL, {"layer_bytes": (128, 0)}, "at least one byte"),
        *((MODEL, {name: 0}, "are positive") for name in ("block_bytes", "block_size", "page_bytes")),
        *((MODEL, {"first_stage_end": byte}, "lie outside") for byte in (-1, 101)),
        *((MODEL, {"last_stage_begin": byte}, "lie outside") for byte in (-1, 101)),
        (MODEL, {"first_cost_layers": float("nan")}, "finite and not negative"),
        *((MODEL, {"last_cost_layers": cost}, "finite and not negative") for cost in (float("inf"), -0.5)),
        (INSTANCE, {"pages": 0}, "a budget of 0 pages"),
        *((INSTANCE, {f"{name}_tokens": -1}, "negative count") for name in ("used", "demanded", "growth")),
        *((INSTANCE, {name: -1}, "negative count") for name in ("num_running", "num_queued")),
        *((INSTANCE, {"link_bytes_per_s": rate}, "link or time") for rate in (float("inf"), -1.0)),
        *((INSTANCE, {"token_s": time_s}, "link or time") for time_s in (float("inf"), -1.0)),
    ],
)
def test_what_cannot_be_is_refused(made: Callable[..., object], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**fields)


def test_a_host_has_one_copy_of_a_layer_however_many_of_its_instances_map_it() -> None:
    """Layers 0 to 3 lie in the memory of both hosts, the others in that of one."""
    copies = [
        ("one", LayerRange(0, 8)),
        ("one", LayerRange(2, 8)),
        ("one", LayerRange(0, 8)),
        ("two", LayerRange(0, 4)),
    ]
    whole = [make_instance(number, host=host, host_copy=copy) for number, (host, copy) in enumerate(copies)]
    assert fewest_host_copies(make_facts(whole)) == 1
    assert fewest_host_copies(make_facts([*whole, make_instance(8)])) == 1
    assert fewest_host_copies(make_facts([make_instance(8)])) == 0
