"""When groups may change, and groups that a person names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from services.planner.config import PlannerSettings
from services.planner.policy.decisions import Decider
from services.planner.policy.levers.ladder import ClusterSnapshot, MemoryLoad, Offer, Situation
from services.planner.policy.observe import observe
from services.planner.policy.patience import Backoff, Cooldown, PatienceParams
from services.planner.policy.plans.chosen import plan_chosen
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams, InstanceFacts
from services.planner.policy.plans.drop_plan import DropPlan, DropRefusal
from services.planner.policy.plans.intent import MAX_PLAN_BYTES, RESTORE, Order, PlanOutcome, intent_of, names_of
from services.planner.policy.restoring.loaded_layers import plan_unload
from services.planner.policy.restoring.restore import RestorePlan, RestoreRefusal, plan_restore
from services.planner.policy.restoring.restore_ratio import RatioWatch
from shared.ids import Incarnation, WorkerId
from shared.layers import LayerRange
from shared.messages.plan import MAX_STEPS, FormGroup, Plan, PlannedWorker, RestoreInstance
from shared.messages.report import Liveness, WorkerStatus
from shared.wire import encode_json
from tests.support.drop_builders import (
    make_facts,
    make_group,
    make_instance,
    make_model,
    make_pair,
    random_facts,
)
from tests.support.kinds import of_kind, some
from tests.support.statuses import make_view
from tests.unit.planner.test_planner_observe import ELASTIC, OBSERVE, status

PATIENCE = PatienceParams(restore_ratio=0.5, restore_hold_s=10.0, cooldown_s=5.0, retry_s=2.0, max_retry_s=20.0)


def test_pauses_double_up_to_a_limit_and_a_success_forgets_them() -> None:
    backoff = Backoff(PATIENCE)
    assert backoff.left_s(0.0) == 0.0
    assert [backoff.failed(100.0) for _ in range(6)] == [2, 4, 8, 16, 20, 20]
    assert (backoff.left_s(100.0), backoff.left_s(119.0), backoff.left_s(121.0)) == (20.0, 1.0, 0.0)
    backoff.succeeded()
    assert backoff.left_s(100.0) == 0.0
    assert backoff.failed(0.0) == 2


def group_of(used: int, demanded: int = 0, **fields: Any) -> list[InstanceFacts]:
    """Two stages; each instance alone has 3 blocks of 16 tokens: 96 tokens in all."""
    return make_pair(used_tokens=used, demanded_tokens=demanded, **fields)


@pytest.mark.parametrize(
    ("members", "is_idle"),
    [
        (group_of(47), True),
        (group_of(48), False),
        (group_of(40, 8), False),
        (group_of(0, throttled=True), False),
        (group_of(0)[:1], False),
        (make_group(0, (2, 4, 8))[:2], False),
        ([make_instance(0)], False),
        ([make_instance(0, 0, 4)], False),
    ],
)
def test_a_group_is_due_after_its_use_was_below_half_of_what_its_members_have_alone(
    members: list[InstanceFacts], is_idle: bool
) -> None:
    watch = RatioWatch(PATIENCE)
    facts = make_facts(members)
    assert [watch.apply(facts, at_s) for at_s in (0.0, 5.0, 9.9)] == [(), (), ()]
    assert watch.apply(facts, 10.0) == (("w00000",) if is_idle else ())
    watch.forget()
    assert watch.apply(facts, 10.1) == ()


def test_every_break_begins_the_wait_anew_for_that_group_only() -> None:
    watch = RatioWatch(PATIENCE)
    other = make_pair("x")
    for at_s in range(10):
        used = 60 if at_s == 4 else 0
        assert watch.apply(make_facts([*group_of(used), *other]), float(at_s)) == ()
    assert watch.apply(make_facts([*group_of(0), *other]), 10.0) == ("x0",)
    assert watch.apply(make_facts([*group_of(0), *other]), 15.0) == ("w00000", "x0")
    watch.forget(["x0", "nobody"])
    assert watch.apply(make_facts([*group_of(0), *other]), 15.5) == ("w00000",)
    assert watch.apply(make_facts([*group_of(0), *other]), 25.5) == ("w00000", "x0")


def loads(**throttled: bool) -> list[MemoryLoad]:
    return [MemoryLoad(WorkerId(name), 1, 1, 0, throttled=is_short) for name, is_short in throttled.items()]


def test_after_a_restore_a_worker_counts_once_it_was_calm() -> None:
    cooldown = Cooldown(PATIENCE)
    assert cooldown.apply(loads(a=True), 0.0) == ""
    cooldown.restored(10.0)
    assert "4.0 s are given to it" in cooldown.apply(loads(a=True, b=True), 11.0)
    assert cooldown.apply(loads(a=False, b=True), 12.0) != ""
    assert cooldown.apply(loads(a=True, b=True), 13.0) == ""
    cooldown.restored(13.5)
    assert cooldown.apply(loads(a=True), 14.0) != ""
    assert cooldown.apply(loads(a=True), 18.5) == ""


# --- by hand, and what workers are told ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_a_group_of_named_instances_is_exactly_of_these_or_there_is_a_reason(seed: int) -> None:
    rng = np.random.default_rng(seed)
    facts = random_facts(rng)
    ids = [each.instance_id for each in facts.instances]
    names = [ids[i] for i in rng.permutation(len(ids))[: int(rng.integers(2, 4))]]
    plan = plan_chosen(facts, DropParams(), names)
    if isinstance(plan, DropRefusal):
        assert plan.reason
        return
    plan.check_invariants(facts)
    (group,) = plan.groups
    assert sorted(stage.instance_id for stage in group.stages) == sorted(names)


GROUPED = [*make_group(0, (4, 8)), make_instance(3), make_instance(4)]
BROKEN = [GROUPED[0], *GROUPED[2:]]
"""One of the group is gone."""


@pytest.mark.parametrize(
    ("there", "names", "reason"),
    [
        (GROUPED, (), "a group takes two workers at least"),
        (GROUPED, (0, 0), "a group takes two workers at least"),
        (GROUPED, (0, 1), "they are one group already"),
        (GROUPED, (0, 3), "'w00001' is in a group with some of them; name it too, or restore the group first"),
        (GROUPED, (3, 9), "'w00009' is no worker that is ready and can drop parameters"),
        (GROUPED, (0, 1, 3, 4), "a layer would be left without a second copy"),
        (BROKEN, (0, 3), "one of them is in a group that lacks layers; it is restored soon"),
        (BROKEN, (3, 0), "one of them is in a group that lacks layers; it is restored soon"),
    ],
)
def test_what_a_person_cannot_have_is_refused_with_the_reason(
    there: list[InstanceFacts], names: tuple[int, ...], reason: str
) -> None:
    chosen = [WorkerId(f"w{number:05d}") for number in names]
    assert of_kind(DropRefusal, plan_chosen(make_facts(there), DropParams(), chosen)).reason == reason


def test_a_person_may_grow_a_group_by_naming_all_of_it() -> None:
    copy = LayerRange(0, 12)
    facts = make_facts(
        [*make_group(0, (6, 12), pages=96, host_copy=copy), make_instance(3, end=12, pages=96)], make_model(12)
    )
    plan = of_kind(DropPlan, plan_chosen(facts, DropParams(), [each.instance_id for each in facts.instances]))
    plan.check_invariants(facts)
    assert len(plan.groups[0].stages) == 3


def test_workers_are_told_process_address_and_layers_of_the_view_that_the_plan_was_made_from() -> None:
    statuses = [
        status(f"w{number}", incarnation=50 + number, stage_address=f"a:{number}", num_used_blocks=10)
        for number in range(2)
    ]
    facts = some(observe(make_view(*statuses), 0.1, OBSERVE).snapshot.facts)
    plan = of_kind(DropPlan, plan_chosen(facts, DropParams(), [WorkerId("w0"), WorkerId("w1")]))
    group = of_kind(FormGroup, intent_of(plan, facts, make_view(*statuses)).steps[0])
    assert [(s.worker_id, s.incarnation, s.address, s.held, s.layers) for s in group.stages] == [
        ("w0", 50, "a:0", (0, 8), (0, 4)),
        ("w1", 51, "a:1", (0, 8), (4, 8)),
    ]
    assert group.num_blocks == plan.groups[0].after_tokens // 16 == 7

    common: dict[str, Any] = {"group": "w0", "num_stages": 2}
    grouped = make_view(status("w0", layers=(0, 4), **common), status("w1", layers=(4, 8), stage=1, **common))
    facts = some(observe(grouped, 0.1, OBSERVE).snapshot.facts)
    restore = of_kind(RestorePlan, plan_restore(facts))
    back = intent_of(restore, facts, grouped)
    assert [(step.kind, step.workers[0].held) for step in back.steps] == [("restore", (0, 4)), ("restore", (4, 8))]


@pytest.mark.parametrize("long_names", [False, True])
def test_of_thousands_of_groups_as_many_as_one_plan_holds_are_restored_whole_and_the_others_are_told_of(
    *, long_names: bool
) -> None:
    """2 600 groups of two are 5 200 steps, and a plan has 4 096 at most; with long names fewer fit its bytes."""
    reports = []
    for number in range(2600):
        leader, member = (f"w{number:04}-{stage}" + "x" * 50 * long_names for stage in range(2))
        common: dict[str, Any] = {"group": leader, "num_stages": 2}
        reports += [
            status(leader, layers=(0, 4), **common),
            status(member, layers=(4, 8), stage=1, **common),
        ]
    view = make_view(*reports)
    facts = some(observe(view, 0.1, OBSERVE).snapshot.facts)
    intent = intent_of(of_kind(RestorePlan, plan_restore(facts)), facts, view)
    names = [step.workers[0].worker_id for step in intent.steps]
    assert names == [each.report.worker_id for each in reports][: len(names)], "whole groups, in their order"
    assert len(names) % 2 == 0
    num_left = 2600 - len(names) // 2
    assert f"; {num_left} more groups do not fit this plan" in intent.reason
    num_bytes = len(encode_json(Plan(epoch=1, plan_id=1, steps=intent.steps, reason=intent.reason)))
    assert num_bytes <= MAX_PLAN_BYTES + 8 * 1024
    assert len(names) == MAX_STEPS or num_bytes > MAX_PLAN_BYTES - 1024
    assert len(names_of(intent)) < 8 * 1024, "a plan of thousands is named by its first groups"


# --- the decider -----------------------------------------------------------------------------------------------------


def pair_of(leader: str, member: str, num_pages: int = 64) -> list[WorkerStatus]:
    """A group with nothing to do; the member has a budget of its own."""
    small = ELASTIC.model_copy(update={"num_pages": num_pages})
    return [
        status(leader, group=leader, num_stages=2, layers=(0, 4)),
        status(member, group=leader, num_stages=2, layers=(4, 8), stage=1, elastic=small),
    ]


def decider(**fields: Any) -> Decider:
    settings = PlannerSettings.model_validate({"instance_id": "p", "system": "kunserve", **fields})
    return Decider(settings.deciding(), settings.levers())


def test_a_group_that_cannot_be_restored_keeps_no_other_from_it() -> None:
    """Whole, 17 pages hold 16 of parameters and no block: that group stays, and is looked at again 10 s later."""
    seen, decides = make_view(*pair_of("a0", "a1", 17), *pair_of("b0", "b1")), decider()
    assert decides.decide(seen, 0.1, 0.0).intent is None
    verdict = decides.decide(seen, 0.1, 10.0)
    assert verdict.refusals == ("a0: a whole copy leaves an instance no room for KV",)
    assert [worker.worker_id for step in some(verdict.intent).steps for worker in step.workers] == ["b0", "b1"]
    only = make_view(*pair_of("a0", "a1", 17))
    told = [decides.decide(only, 0.1, 10.0 + tick * 0.5).refusals for tick in range(1, 61)]
    assert sum(map(len, told)) == 2, "once in 10 s"


@dataclass(frozen=True)
class Tidying:
    """A standing lever that offers what is no drop: by which groups load, or become whole."""

    plan: Callable[[ClusterFacts], Order | RestoreRefusal]
    name: str = "tidy"
    is_standing: bool = True

    def offer(self, snapshot: ClusterSnapshot) -> Offer | None:
        """Return it at a price of half a second."""
        order = self.plan(some(snapshot.facts))
        return None if isinstance(order, RestoreRefusal) else Offer(0.5, order.reason, order)


@pytest.mark.parametrize(
    ("plan", "kinds"),
    [
        (lambda facts: plan_unload(facts, ["a0"], "as a lever sees fit"), ["unload"]),
        (plan_restore, ["restore", "restore"]),
    ],
)
def test_a_lever_may_offer_any_order(plan: Callable[[ClusterFacts], Order | RestoreRefusal], kinds: list[str]) -> None:
    decides = Decider(PlannerSettings(instance_id="p", system="kunserve").deciding(), (Tidying(plan),))
    seen = make_view(*pair_of("a0", "a1"))
    verdict = decides.decide(seen, 0.1, 0.0)
    intent = some(verdict.intent)
    assert [step.kind for step in intent.steps] == kinds
    assert (intent.lever, intent.reason) == ("tidy", verdict.decision.reason)
    assert not decides.decide(seen, 0.1, 0.5).decision.differs_from(verdict.decision)


def test_nothing_is_restored_while_nobody_sees_the_cluster() -> None:
    seen, decides = make_view(*pair_of("a0", "a1")), decider()
    decides.decide(seen, 0.1, 0.0)
    assert decides.decide(seen, 2.0, 11.0).decision.situation is Situation.BLIND
    assert decides.decide(seen, 0.1, 12.0).intent is None, "the wait begins anew"
    assert decides.decide(seen, 0.1, 22.0).intent is not None


def test_a_restore_that_failed_is_tried_again_after_the_pause_and_no_sooner() -> None:
    seen, decides = make_view(*pair_of("a0", "a1")), decider(retry_s=4.0)
    decides.decide(seen, 0.1, 0.0)
    assert decides.decide(seen, 0.1, 10.0).intent is not None
    decides.note(PlanOutcome(is_done=False, reason="a worker refused", lever=RESTORE), 10.0)
    assert [decides.decide(seen, 0.1, 10.0 + after_s).intent is not None for after_s in (0.5, 3.9, 4.0)] == [
        False,
        False,
        True,
    ]


def test_nothing_is_decided_until_reports_show_the_last_plan_or_had_time_enough() -> None:
    decides = decider(settle_limit_s=5.0)
    worker = PlannedWorker(worker_id=WorkerId("w"), incarnation=Incarnation(3), held=(0, 8))
    outcome = PlanOutcome(
        is_done=True, reason="", plan_id=7, steps=(RestoreInstance(worker=worker),), done=(WorkerId("w"),)
    )
    before, after = make_view(status("w", plan_id=6)), make_view(status("w", plan_id=7))
    for seen, is_settled in [
        (None, False),
        (before, False),
        (after, True),
        (make_view(status("w", incarnation=4)), True),
        (make_view(status("w", liveness=Liveness.DEAD)), True),
    ]:
        decides.note(outcome, 100.0)
        assert decides.is_settled(seen, 100.1) == is_settled
    decides.note(outcome, 100.0)
    assert not decides.is_settled(before, 104.9)
    assert decides.is_settled(before, 105.0)
    assert decides.is_settled(before, 100.1), "once is enough"
