"""Has workers change their roles at the moments that a seed names, as planners do, and as planners that die."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from services.planner.policy.observe import ObserveParams, observe
from services.planner.policy.plans.capacity import CapacityRule
from services.planner.policy.plans.drop_facts import ClusterFacts, DropParams
from services.planner.policy.plans.merging import Merger
from services.planner.policy.restoring.loaded_layers import ahead_blocks
from shared.layers import LayerRange, even_split
from shared.messages.base import MAX_EPOCH
from shared.messages.plan import AbortPlan, CommitPlan, FormGroup, LoadBeside, PlanAnswer, PlanState, Step, UnloadBeside
from shared.messages.report import ClusterView, Liveness, WorkerPhase, WorkerReport, WorkerStatus
from shared.transport.memory_bus import MemoryBroker
from sim.faults.kinds import CHANGE_KINDS, Fault, FaultKind
from sim.plan_driver import PlanDriver, alone, group_of, load_beside, unload_beside

ATTEMPTS = 12
PAUSE_S = 1.0
LONGEST_HOLD_S = 600.0
"""The longest time for which a message can ask a worker to wait; none waits for so long."""
_HEARD_S = 2.0
"""Of a worker that was not heard for so long, nothing is known."""


class Conductor:
    """Speaks to the workers under epochs of its own.

    Args:
        broker: of the cluster; its connection has no faults.
        say: told what is done.
    """

    def __init__(self, broker: MemoryBroker, say: Callable[[str], None]) -> None:
        self.answers: Counter[str] = Counter()
        """What workers said, and what changed."""
        self._driver = PlanDriver(broker.connect("conductor"))
        self._say = say
        self._num_merges = 0
        """Under way."""
        self._num_formed = 0
        self._num_stays = 0
        """How often a group joined no other one."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Hear the workers."""
        await self._driver.start()

    def begin(self, fault: Fault) -> None:
        """Begin a change in which the named worker takes part."""
        task = asyncio.ensure_future(self._change(fault))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def note(self, fault: Fault) -> None:
        """Hear of a fault that begins now."""
        if self._num_merges and fault.kind not in CHANGE_KINDS:
            self.answers["merge struck"] += 1

    async def restore_all(self) -> None:
        """Make every worker whole again."""
        for _ in range(ATTEMPTS):
            if self._tasks:
                await asyncio.wait(self._tasks)
            if all(report.num_stages == 1 for report in self._driver.reports.values()):
                return
            grouped = [report for report in self._known() if report.num_stages > 1]
            if grouped:
                await self._finish([alone(report) for report in grouped], FaultKind.CHANGE)
            await asyncio.sleep(PAUSE_S)

    def _known(self) -> list[WorkerReport]:
        """Return the workers that have been heard just now and serve, by name."""
        now_s, driver = asyncio.get_running_loop().time(), self._driver
        return [
            report
            for name, report in sorted(driver.reports.items())
            if report.phase is WorkerPhase.READY and now_s - driver.heard_s[name] < _HEARD_S
        ]

    async def _change(self, fault: Fault) -> None:
        self._driver.limit_s = fault.duration_s
        steps = self._choose(fault.target)
        if steps:
            await self._finish(steps, fault.kind)

    def _choose(self, name: str) -> list[Step]:
        """A worker that is alone forms a group with others that are; of two groups of two one of four is made.

        Every other group loads parameters beside, with memory for KV ahead or without, gives them up again, or is
        dissolved. What would leave a layer without a second copy is not done.
        """
        known = self._known()
        report = next((each for each in known if each.worker_id == name), None)
        if report is None:
            return []
        if report.num_stages == 1:
            others = [other for other in known if other.num_stages == 1 and other.worker_id != name]
            self._num_formed += 1
            members = [report, *others[: 2 - self._num_formed % 2]]
            if len(members) < 2 or not _leaves_copies(known, len(members)):
                return []
            return [group_of(members, even_split(report.num_layers, len(members)))]
        own = [member for member in known if member.group == report.group]
        merged = _merge_pairs(own, known) if _leaves_copies(known, 2) else None
        if merged is not None:
            return [merged]
        self._num_stays += 1
        step = _beside(own, is_ahead=bool(self._num_stays % 2)) if self._num_stays % 3 else None
        return [alone(member) for member in own] if step is None else [step]

    async def _finish(self, steps: list[Step], kind: FaultKind) -> None:
        if not _is_merge(steps):
            await self._carry_out(steps, kind)
            return
        self._num_merges += 1
        try:
            self.answers[f"merge {await self._carry_out(steps, kind)}"] += 1
        finally:
            self._num_merges -= 1

    async def _carry_out(self, steps: list[Step], kind: FaultKind) -> str:
        """Return in a word how far the change came."""
        if kind is FaultKind.CHANGE_ABANDONED:
            self._driver.limit_s = LONGEST_HOLD_S
        plan_id, answers = await self._driver.prepare(*steps)
        workers: list[str] = [worker.worker_id for step in steps for wave in step.waves for worker in wave]
        what = steps[0].kind if isinstance(steps[0], LoadBeside | UnloadBeside) else "change"
        self._note("prepare", answers.values())
        good = all(answer is not None and answer.state is PlanState.PREPARED for answer in answers.values())
        self._say(f"plan     {plan_id} of {', '.join(workers)}: {'prepared' if good else 'not prepared'}")
        if kind is FaultKind.CHANGE_ABANDONED:
            return "abandoned"
        if kind is FaultKind.CHANGE_BY_HALF:
            workers = workers[: len(workers) // 2]
        if kind is FaultKind.CHANGE_TWICE and what == "change":
            await self._speak_twice(plan_id, workers, commit=good)
        elif kind is FaultKind.CHANGE_TWICE:
            workers = [name for name in workers for _ in range(2)]
        ends = await self._end(plan_id, workers, commit=good, one_by_one=what != "change")
        self._note("commit" if good else "abort", ends)
        is_done = all(answer is not None and answer.state is PlanState.DONE for answer in ends)
        if good and is_done:
            self.answers[f"{what} done"] += 1
        if not good:
            return "aborted"
        if kind is FaultKind.CHANGE_BY_HALF:
            return "by half"
        return "committed" if is_done else "broken"

    async def _end(
        self, plan_id: int, workers: Sequence[str], *, commit: bool, one_by_one: bool
    ) -> list[PlanAnswer | None]:
        """Tell all at once, or one after the other as long as each has done it; the rest hear that it is off."""
        if not one_by_one:
            return list((await self._driver.finish(plan_id, workers, commit=commit)).values())
        ends: list[PlanAnswer | None] = []
        for name in workers:
            answer = (await self._driver.finish(plan_id, [name], commit=commit))[name]
            commit &= answer is not None and answer.state is PlanState.DONE
            ends.append(answer)
        return ends

    async def _speak_twice(self, plan_id: int, workers: list[str], *, commit: bool) -> None:
        """Send the word that ends the plan at once with others that contradict it, of an older planner and of none."""
        epoch, word = self._driver.epoch, CommitPlan if commit else AbortPlan
        contrary = AbortPlan if commit else CommitPlan
        stale = [self._driver.ask(name, contrary(epoch=epoch - 1, plan_id=plan_id)) for name in workers if epoch > 1]
        made_up = [self._driver.ask(name, contrary(epoch=MAX_EPOCH, plan_id=plan_id)) for name in workers]
        again = [self._driver.ask(name, word(epoch=epoch, plan_id=plan_id)) for name in workers]
        answers = await asyncio.gather(*stale, *made_up, *again)
        self._note("stale", answers[: len(stale)])
        self._note("made up", answers[len(stale) : len(stale) + len(made_up)])

    def _note(self, word: str, answers: Iterable[PlanAnswer | None]) -> None:
        self.answers.update(f"{word} {'silent' if answer is None else answer.state.value}" for answer in answers)


def _beside(own: Sequence[WorkerReport], *, is_ahead: bool) -> LoadBeside | UnloadBeside | None:
    """Return the group with all parameters beside, or without if they are; None: not all of its stages are known.

    Args:
        own: its members, in any order.
        is_ahead: beside, it has so few blocks that KV can move ahead of a restore.
    """
    stages = sorted(own, key=lambda report: report.stage)
    if [stage.stage for stage in stages] != list(range(own[0].num_stages)):
        return None
    facts = _facts(stages)
    if facts is None:
        return None
    rule, whole = CapacityRule(facts.model), facts.model.all_layers
    is_beside = any(LayerRange(*stage.resident) != LayerRange(*stage.layers) for stage in stages)
    num_blocks = min(
        rule.blocks(each.layers, each.num_pages, each.max_blocks, None if is_beside else whole)
        for each in facts.instances
    )
    if is_ahead and not is_beside:
        num_blocks = ahead_blocks(rule, facts.instances)
    if not num_blocks:
        return None
    return unload_beside(stages, num_blocks) if is_beside else load_beside(stages, num_blocks)


def _is_merge(steps: Sequence[Step]) -> bool:
    """Return whether a group forms of workers that are in groups already."""
    return any(
        isinstance(step, FormGroup) and any(stage.held != (0, step.stages[-1].layers[1]) for stage in step.stages)
        for step in steps
    )


def _merge_pairs(own: Sequence[WorkerReport], known: Sequence[WorkerReport]) -> FormGroup | None:
    """Return the group of four that a group of two forms with another one, if there is one; ranges are halved."""
    first = _pair(own)
    others = dict.fromkeys(other.group for other in known if other.num_stages == 2 and other.group != own[0].group)
    for group in others:
        second = _pair([other for other in known if other.group == group])
        if not first or [each.layers for each in first] != [each.layers for each in second]:
            continue
        members = [member for pair in zip(first, second, strict=True) for member in pair]
        ranges = [LayerRange(*each.layers) for each in first]
        if min(map(len, ranges)) > 1:
            return group_of(members, [half for layers in ranges for half in _halves(layers)])
    return None


def _pair(reports: Sequence[WorkerReport]) -> list[WorkerReport]:
    """Return the stages of a group of two in order; none if they are not both known."""
    members = sorted(reports, key=lambda report: report.stage)
    return members if [(each.stage, each.num_stages) for each in members] == [(0, 2), (1, 2)] else []


def _halves(layers: LayerRange) -> list[LayerRange]:
    return [LayerRange(layers.first + half.first, layers.first + half.end) for half in even_split(len(layers), 2)]


def _leaves_copies(known: Sequence[WorkerReport], num_merged: int) -> bool:
    """Return whether so many groups may become one by the planner's rule of second copies."""
    facts = _facts(known)
    assert facts is not None, "their layers can be dropped"
    merger = Merger(facts, DropParams(), required_tokens=1)
    return merger.num_groups - num_merged + 1 >= merger.min_groups


def _facts(known: Sequence[WorkerReport]) -> ClusterFacts | None:
    """Return what a planner would know by these reports; None: no plan could count on them."""
    workers = tuple(WorkerStatus(liveness=Liveness.ALIVE, age_s=0.0, report=report) for report in known)
    view = ClusterView(sequence_number=0, workers=workers)
    return observe(view, 0.0, ObserveParams(throughput=(1.0,))).snapshot.facts
