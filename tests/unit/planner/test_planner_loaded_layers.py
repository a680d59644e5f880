"""Loads beside serving: what fits, and when a group loads, gives back, or has all it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.planner.policy.patience import PatienceParams
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import (
    ClusterFacts,
    InstanceFacts,
    ModelFacts,
    expected_tokens,
    groups_of,
    wanted_tokens,
)
from services.planner.policy.restoring.loaded_layers import (
    LoadedLayers,
    LoadedLayersPlan,
    beside_groups,
    beside_tokens,
    loaded_layers_of,
    pipeline_of,
    plan_load,
    plan_unload,
    room_beside,
)
from services.planner.policy.restoring.loaded_layers_watch import MAX_LOADS, Due, LoadedLayersWatch
from services.planner.policy.restoring.restore import RestorePlan, RestoreRefusal, plan_restore
from services.planner.policy.restoring.restore_ratio import RatioWatch
from shared.ids import WorkerId
from shared.layers import LayerRange
from tests.support.drop_builders import (
    literal_blocks,
    make_facts,
    make_group,
    make_instance,
    make_model,
    make_pair,
    pages_of,
    random_facts,
)
from tests.support.kinds import of_kind
from tests.support.seeds import first_of

PATIENCE = PatienceParams(restore_hold_s=10.0, retry_s=2.0, max_retry_s=20.0, load_stall_s=30.0)
WIDE = replace(PATIENCE, restore_ratio=0.7)
"""A group is due with more than what can move ahead."""
WHOLE = LayerRange(0, 8)
GROUP = "w00000"


def able(facts: ClusterFacts, resident: LayerRange | None = None, loaded_ratio: float = 1.0) -> ClusterFacts:
    """Return instances that can load beside serving; those in groups have these layers beside, None: nothing."""
    whole = facts.model.all_layers
    return replace(
        facts,
        instances=tuple(
            replace(
                each,
                resident=(resident if each.group_id else None) or each.layers,
                loaded_ratio=loaded_ratio if resident and each.group_id else 1.0,
                host_copy=whole,
            )
            for each in facts.instances
        ),
    )


def group_of(used: int = 0, **fields: Any) -> ClusterFacts:
    """Two stages of 4 layers, 64 pages each: 3 blocks of 16 tokens alone, 7 as a group, (64 - 16) / 8 = 6 beside."""
    return able(make_facts(make_pair(used_tokens=used, **fields)))


def beside(facts: ClusterFacts, ratio: float = 1.0) -> ClusterFacts:
    return able(facts, WHOLE, ratio)


def literal_ahead(model: ModelFacts, stages: Sequence[InstanceFacts], most: int) -> int:
    """Return the largest group of which each member can hold its own layers, and all others of an nth: by trying."""
    whole, size = model.all_layers, len(stages)

    def pages(num_blocks: int) -> int:
        return sum(1 for page in range(10_000) if page * model.page_bytes < num_blocks * model.block_bytes)

    def fits(num_blocks: int) -> bool:
        share = -(-num_blocks // size)
        return all(
            pages_of(model, whole)
            + 2 * len(stage.layers) * pages(num_blocks)
            + 2 * (model.num_layers - len(stage.layers)) * pages(share)
            <= stage.num_pages
            and share <= literal_blocks(model, whole, stage.num_pages, stage.max_blocks)
            for stage in stages
        )

    return max((count for count in range(1, most + 1) if fits(count)), default=0)


# --- what fits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", first_of(range(80), 20))
def test_nothing_is_loaded_that_does_not_fit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    facts, ratio = able(random_facts(rng, num_drops=3)), float(rng.choice([0.1, 0.5, 1.0]))
    for name, members in groups_of(facts).items():
        stages = pipeline_of(facts.model, members)
        if not stages:
            assert isinstance(plan_load(facts, name, ratio), RestoreRefusal), "it is alone"
            continue
        whole = facts.model.all_layers
        room = min(literal_blocks(facts.model, s.layers, s.num_pages, s.max_blocks, whole) for s in stages)
        fits = room and wanted_tokens(stages) < ratio * room * facts.model.block_size
        plan = plan_load(facts, name, ratio)
        if isinstance(plan, RestoreRefusal):
            assert not fits or isinstance(plan_restore(facts, (name,)), RestoreRefusal), plan.reason
            continue
        assert fits
        assert isinstance(plan_restore(facts, (name,)), RestorePlan), "what is loaded for nothing"
        alone = min(literal_blocks(facts.model, whole, s.num_pages, s.max_blocks) for s in stages)
        ahead = literal_ahead(facts.model, stages, room)
        expected = expected_tokens(stages, 2.0) / (0.85 * facts.model.block_size)
        needed = min(ceil(expected), room)
        num_blocks = alone if expected <= alone else ahead if expected <= ahead else needed
        assert [(group.group_id, group.num_blocks) for group in plan.groups] == [(name, num_blocks)]
        plan.check_invariants(facts)


def test_a_group_with_all_the_blocks_there_are_has_no_memory_for_copies() -> None:
    facts = beside(group_of())
    rule, stages = CapacityRule(facts.model), facts.instances
    rooms = {}
    for num_blocks in range(1, 7):
        rooms[num_blocks] = room_beside(rule, [replace(stage, num_blocks=num_blocks) for stage in stages])
    assert rooms == {**{n: (16 * n, True) for n in range(1, 6)}, 6: (96, False)}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_given_back_is_the_room_that_there_was_before_the_load(seed: int) -> None:
    before = able(random_facts(np.random.default_rng(seed), num_drops=3))
    names = [name for name, members in groups_of(before).items() if pipeline_of(before.model, members)]
    if not names:
        return
    plan = plan_unload(able(before, before.model.all_layers), names, "enough")
    plan.check_invariants(before)
    rule = CapacityRule(before.model)
    expected = [rule.group_blocks(groups_of(before)[name]) for name in names]
    assert [group.num_blocks for group in plan.groups] == expected
    assert plan.resident is None
    assert plan.reason.startswith(f"enough; room for {sum(expected) * before.model.block_size} tokens, now ")


@given(st.integers(1, 4), st.integers(1, 4), st.integers(20, 300))
def test_stages_of_equal_size_have_as_much_beside_the_whole_model_as_alone_together(
    size: int, num_stages: int, pages: int
) -> None:
    model = make_model(size * num_stages)
    stages = make_group(0, [size * (i + 1) for i in range(num_stages)], pages=pages)
    rule = CapacityRule(model)
    assert rule.tokens(rule.whole_blocks(stages)) <= beside_tokens(rule, stages)


def test_a_load_says_its_bytes_and_the_room_before_and_meanwhile() -> None:
    model = make_model(8, layer_bytes=(2**30,) * 8, page_bytes=2**30, block_bytes=2**30)
    facts = able(make_facts(make_group(0, (4, 8)), model))
    plan = of_kind(LoadedLayersPlan, plan_load(facts, GROUP, 0.5))
    said = "8.00 GiB of parameters are loaded beside serving; room for 48 tokens meanwhile, 112 before"
    assert plan.reason == said, "(64 - 4) / 8 = 7 blocks of 16, and (64 - 8) / 16 = 3 of all layers"


def test_what_is_loaded_already_is_not_counted_again() -> None:
    plan = of_kind(RestorePlan, plan_restore(beside(group_of())))
    assert plan.loads == ()
    assert "their parameters are loaded already; room for 96 tokens, now 96" in plan.reason
    half = of_kind(RestorePlan, plan_restore(beside(group_of(), 0.9)))
    assert sum(load.num_bytes for load in half.loads) == 8 * 128, "nobody knows which"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"resident": None}, "w00000: not all of its members can load parameters beside serving"),
        ({"host_copy": None}, "w00000: not all of its members can load parameters beside serving"),
        ({"host_copy": LayerRange(0, 7)}, "w00000: not all of its members can load parameters beside serving"),
        (
            {"used_tokens": 40, "demanded_tokens": 8},
            "w00000: its requests want 48 tokens of KV; beside the whole model it has room for 96",
        ),
        ({"num_pages": 16}, "w00000: its requests want 0 tokens of KV; beside the whole model it has room for 0"),
        ({"num_pages": 28}, "w00000: a whole copy leaves an instance no room for KV"),
    ],
)
def test_why_a_group_cannot_load(change: dict[str, object], reason: str) -> None:
    first, second = group_of().instances
    refusal = plan_load(make_facts([replace(first, **change), second]), GROUP, 0.5)  # type: ignore[arg-type]
    assert isinstance(refusal, RestoreRefusal)
    assert refusal.reason == reason


@pytest.mark.parametrize("which", [[0], [1], [0, 2], [1, 2]])
def test_a_group_that_lacks_a_member_is_no_pipeline(which: list[int]) -> None:
    stages = make_group(0, (2, 5, 8))
    assert [each.layers.first for each in pipeline_of(make_model(), stages[::-1])] == [0, 2, 5]
    assert pipeline_of(make_model(), [stages[i] for i in which]) == ()
    assert pipeline_of(make_model(), [make_instance(0)]) == ()
    assert pipeline_of(make_model(), [replace(each, group_id="w00001") for each in stages]) == (), "led by another"


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        (((0, 4), 1.0, (4, 8), 1.0), LoadedLayers.NOTHING),
        (((0, 8), 1.0, (4, 8), 1.0), LoadedLayers.BY_HALF),
        (((0, 4), 1.0, (0, 8), 0.5), LoadedLayers.BY_HALF),
        (((0, 8), 1.0, (2, 8), 1.0), LoadedLayers.BY_HALF),
        (((0, 8), 1.0, (0, 8), 0.99), LoadedLayers.LOADING),
        (((0, 8), 1.0, (0, 8), 1.0), LoadedLayers.LOADED),
    ],
)
def test_what_a_group_has_beside_is_what_each_of_its_members_has(
    members: tuple[tuple[int, int], float, tuple[int, int], float], expected: LoadedLayers
) -> None:
    first, second = make_group(0, (4, 8))
    stages = [
        replace(first, resident=LayerRange(*members[0]), loaded_ratio=members[1]),
        replace(second, resident=LayerRange(*members[2]), loaded_ratio=members[3]),
    ]
    assert loaded_layers_of(make_model(), stages) is expected
    names = (GROUP,) if expected is not LoadedLayers.NOTHING else ()
    assert beside_groups(make_facts([*stages, make_instance(5)]), [WorkerId("w00001"), WorkerId("w00005")]) == names
    assert beside_groups(make_facts(stages), [WorkerId("w00005")]) == ()


# --- when ------------------------------------------------------------------------------------------------------------


def due(
    facts: ClusterFacts, now_s: float = 0.0, watch: LoadedLayersWatch | None = None, *, is_idle: bool = True
) -> Due:
    return (watch or LoadedLayersWatch(PATIENCE)).apply(facts, (GROUP,) if is_idle else (), now_s)


NOTHING, LOAD, RESTORE = Due(), Due(load=(GROUP,)), Due(restore=(GROUP,))


def test_a_group_that_is_idle_loads_and_one_that_has_all_is_restored() -> None:
    assert due(group_of()) == LOAD
    assert due(group_of(), is_idle=False) == NOTHING
    assert due(beside(group_of(), 0.5)) == NOTHING, "it loads"
    assert due(beside(group_of(47))) == RESTORE
    assert due(beside(group_of(47)), is_idle=False) == RESTORE, "no second hold"
    assert due(beside(group_of(48))) == NOTHING, "3 of 6 blocks: not below half"


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_a_group_that_runs_short_or_fills_up_gives_back(ratio: float) -> None:
    """Half way from 0.5 to 1: 72 of 96 tokens are kept."""
    assert due(beside(group_of(72), ratio)) == NOTHING
    assert due(beside(group_of(60, demanded_tokens=13), ratio)).unload == (
        (GROUP, "w00000: its requests want 73 tokens of KV, over 75% of the room there is"),
    )
    assert due(beside(group_of(throttled=True), ratio)).unload == ((GROUP, "w00000: it runs short of memory"),)


def test_of_a_group_that_lost_a_member_nothing_is_due() -> None:
    facts = beside(group_of(throttled=True))
    assert due(make_facts(facts.instances[:1])) == NOTHING


def test_without_loads_beside_groups_are_restored_in_one_step_from_wherever_they_are() -> None:
    watch = LoadedLayersWatch(replace(PATIENCE, restore_beside=False))
    for facts in (group_of(), beside(group_of(), 0.5), beside(group_of())):
        assert due(facts, watch=watch) == RESTORE
    assert due(beside(group_of(), 0.5), watch=watch, is_idle=False) == NOTHING


def linked(used: int, link: float = 1e9) -> ClusterFacts:
    """The group, whose KV can move: 4 blocks, of which each has its layers, and all of 2; 0.85 of that are 54."""
    facts = group_of(used)
    return replace(facts, instances=tuple(replace(each, link_bytes_per_s=link) for each in facts.instances))


def test_a_group_waits_a_while_until_its_kv_can_move_ahead() -> None:
    watch = LoadedLayersWatch(WIDE)
    assert [due(linked(55), at_s, watch) for at_s in (0.0, 9.9, 10.0)] == [NOTHING, NOTHING, LOAD]
    watch = LoadedLayersWatch(WIDE)
    assert due(linked(55), 0.0, watch) == NOTHING
    assert due(linked(54), 0.5, watch) == LOAD, "now it fits"


@pytest.mark.parametrize("breaks", ["it is used", "nobody sees it"])
def test_that_wait_begins_anew(breaks: str) -> None:
    watch = LoadedLayersWatch(WIDE)
    assert due(linked(55), 0.0, watch) == NOTHING
    if breaks == "it is used":
        assert due(linked(55), 8.0, watch, is_idle=False) == NOTHING
    else:
        watch.forget()
    assert [due(linked(55), at_s, watch) for at_s in (9.0, 18.9, 19.0)] == [NOTHING, NOTHING, LOAD]


def test_nobody_waits_for_what_cannot_be() -> None:
    assert due(linked(55, link=0.0), watch=LoadedLayersWatch(WIDE)) == LOAD, "its KV does not move at all"
    assert due(linked(55), watch=LoadedLayersWatch(replace(WIDE, ahead_wait_s=0.0))) == LOAD
    in_one_step = LoadedLayersWatch(replace(WIDE, restore_beside=False))
    assert due(linked(55), watch=in_one_step) == RESTORE


def test_who_cannot_load_beside_is_restored_in_one_step() -> None:
    """Stages of 1 and 7 layers have (64 - 16) / 14 = 3 blocks beside, and alone 6: 24 tokens are half of 3 only."""
    first, second = group_of().instances
    assert due(make_facts([first, replace(second, resident=None)])) == RESTORE
    small, large = make_group(0, (1, 8))
    assert due(able(make_facts([replace(small, used_tokens=24), large]))) == RESTORE
    assert due(able(make_facts([replace(small, used_tokens=23), large]))) == LOAD


def test_a_load_that_makes_no_progress_is_given_up_after_the_limit() -> None:
    watch = LoadedLayersWatch(PATIENCE)
    for at_s, ratio in [(0.0, 0.5), (29.0, 0.5), (30.0, 0.6), (59.9, 0.6)]:
        assert due(beside(group_of(), ratio), at_s, watch) == NOTHING
    expected = ((GROUP, "w00000: nothing has been loaded for 30 s"),)
    assert due(beside(group_of(), 0.6), 60.0, watch).unload == expected
    watch.forget()
    assert due(beside(group_of(), 0.6), 61.0, watch) == NOTHING, "nobody has seen it meanwhile"


def test_pauses_between_loads_that_fail_double_and_the_last_one_is_followed_by_a_restore_in_one_step() -> None:
    watch, now_s = LoadedLayersWatch(PATIENCE), 0.0
    for number in range(MAX_LOADS):
        assert due(group_of(), now_s, watch) == LOAD
        watch.loaded([GROUP], now_s, is_done=False)
        if number < MAX_LOADS - 1:
            pause_s = 2.0 * 2**number
            assert due(group_of(), now_s + pause_s - 0.1, watch) == NOTHING
            now_s += pause_s
    assert due(group_of(), now_s, watch) == RESTORE
    assert due(make_facts([]), now_s, watch) == NOTHING, "the group is no more"
    assert due(group_of(), now_s, watch) == LOAD, "the next of this name begins anew"


def test_an_unload_that_was_refused_is_tried_again_alone_after_a_pause() -> None:
    facts = make_facts([*make_pair(), *make_pair("x")])
    facts = beside(replace(facts, instances=tuple(replace(each, throttled=True) for each in facts.instances)))
    watch = LoadedLayersWatch(PATIENCE)
    assert [name for name, _ in due(facts, 0.0, watch).unload] == [GROUP, "x0"]
    watch.unloaded([GROUP, "x0"], 0.0, is_done=False)
    assert due(facts, 1.9, watch).unload == ()
    assert [name for name, _ in due(facts, 2.0, watch).unload] == [GROUP]
    watch.unloaded([GROUP], 2.0, is_done=False)
    assert [name for name, _ in due(facts, 2.1, watch).unload] == ["x0"]
    watch.unloaded(["x0"], 2.1, is_done=True)
    assert [name for name, _ in due(facts, 60.0, watch).unload] == ["x0"], "who has not refused goes first"


def test_what_has_all_is_restored_before_those_that_stop_to_load() -> None:
    """One plan of both would keep the planner busy until the last has loaded."""
    slow = make_pair("x")
    facts = make_facts([*beside(group_of()).instances, *slow])
    watch = LoadedLayersWatch(PATIENCE)
    assert watch.apply(facts, (GROUP, "x0"), 0.0) == RESTORE
    assert watch.apply(make_facts(slow), ("x0",), 0.0) == Due(restore=("x0",))


def test_a_load_that_came_to_its_end_makes_up_for_those_that_failed() -> None:
    watch = LoadedLayersWatch(PATIENCE)
    watch.loaded([GROUP], 0.0, is_done=False)
    watch.loaded([GROUP], 2.0, is_done=False)
    assert due(beside(group_of(60)), 10.0, watch) == NOTHING, "all is there"
    watch.loaded([GROUP], 20.0, is_done=False)
    assert [due(group_of(), at_s, watch) for at_s in (21.9, 22.0)] == [NOTHING, LOAD], "the first pause again"


# --- over time -------------------------------------------------------------------------------------------------------


@dataclass
class World:
    """One group, a planner that does at once what is due, and loads that take 3 ticks of half a second."""

    watch: LoadedLayersWatch = field(default_factory=lambda: LoadedLayersWatch(PATIENCE))
    restores: RatioWatch = field(default_factory=lambda: RatioWatch(PATIENCE))
    resident: LayerRange | None = None
    ratio: float = 1.0
    now_s: float = 0.0
    loads_s: list[float] = field(default_factory=list)
    restored_s: float | None = None

    def tick(self, used: int, *, throttled: bool, fails: bool) -> None:
        """Half a second with this load; plans fail if they are to."""
        if self.restored_s is not None:
            return
        self.now_s += 0.5
        self.ratio = min(self.ratio + 0.2, 1.0)
        facts = able(group_of(used, throttled=throttled), self.resident, self.ratio)
        found = self.watch.apply(facts, self.restores.apply(facts, self.now_s), self.now_s)
        todo = [*found.load, *found.restore, *(name for name, _ in found.unload)]
        assert todo in ([], [GROUP]), "two things are due at once with one group"
        assert bool(found.unload) <= (self.resident is not None), "nothing is there to be given back"
        assert bool(found.load) <= (self.resident is None and not throttled and used < 48)
        assert bool(found.restore) <= (not throttled and used < 48)
        self._carry_out(found, fails=fails)

    def _carry_out(self, found: Due, *, fails: bool) -> None:
        if found.load:
            self.loads_s.append(self.now_s)
            self.watch.loaded([GROUP], self.now_s, is_done=not fails)
            if not fails:
                self.resident, self.ratio = WHOLE, 0.5
        elif found.unload:
            self.watch.unloaded([GROUP], self.now_s, is_done=not fails)
            self.restores.forget([GROUP])
            if not fails:
                self.resident = None
        elif found.restore and not fails:
            self.restored_s = self.now_s


TICKS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 100), st.booleans(), st.booleans()), min_size=1, max_size=12
)


@pytest.mark.slow
@given(TICKS)
def test_however_the_load_changes_a_group_loads_once_per_hold_and_calm_makes_it_whole(
    ticks: list[tuple[int, int, bool, bool]],
) -> None:
    """Each stretch lasts some ticks, with some tokens in use; tries that fail are paused for 2 s and more."""
    world = World()
    for count, used, throttled, fails in ticks:
        for _ in range(count):
            world.tick(used, throttled=throttled, fails=fails)
    gaps = np.diff(world.loads_s)
    assert (gaps >= 2.0).all()
    if not any(fails for *_, fails in ticks):
        assert (gaps >= PATIENCE.restore_hold_s).all()
    for _ in range(2 * 60):
        world.tick(0, throttled=False, fails=False)
    assert world.restored_s is not None
