"""Live workers that are driven step by step through anything that may happen to a group: no page is ever lost.

Real models, agents, engines and sockets (`torch_cluster`); what happens, and to whom, is drawn by seed. After each step
the ledger, the mappings and the operating system's own list of them are compared; in the middle of a change, the ledger
with itself at every call that maps or unmaps a page. And every text is what the model says undisturbed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from services.dispatcher.session import history
from services.worker.engine.stats import take_stats
from shared.layers import LayerRange
from shared.messages.plan import CommitPlan, FormGroup, PlanAnswer, PlanState
from shared.messages.report import WorkerReport
from shared.types import FinishReason
from sim.plan_driver import group_of
from sim.requests import SimAnswer, SimRequest
from tests.support.hand_planner import states
from tests.support.mapped_pages import rule_of
from tests.support.runners import MIB
from tests.support.torch_cluster import STAGE_LIMIT_S, TorchCluster

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(120)]

NUM_LAYERS = 4
WHOLE = (0, NUM_LAYERS)
NUM_SEEDS = 2
MAX_PROMPT, MAX_OUTPUT = 120, 160
"""Tokens, less than; every worker takes both together."""
NAMES = ("restore", "restore_one", "abandon", "silence", "half", "stale", "cancel", "kill", "kill", "fault", "fault")
BESIDE = ("load", "load", "load", "load_and_restore", "unload", "fault_beside", "fault_beside")
DECK = ("drop",) * 6 + ("regroup",) + NAMES + BESIDE
"""What happens in every life, in an order of its own."""


def claimed(report: WorkerReport, layers: LayerRange, resident: LayerRange | None = None) -> int:
    """Return the KV blocks that a planner expects of a worker with these layers, which knows it by its report."""
    assert report.elastic is not None
    return rule_of(report.elastic, report.block_size).blocks(
        layers, report.elastic.num_pages, report.elastic.max_blocks, resident
    )


def beside_of(report: WorkerReport, num_blocks: int, room: int) -> int:
    """Return the blocks of a stage that was left so many: no more if that leaves memory for KV of other layers."""
    assert report.elastic is not None
    rule, facts = rule_of(report.elastic, report.block_size), report.elastic
    if not rule.blocks_ahead(LayerRange(*report.layers), facts.num_pages, num_blocks, facts.max_blocks):
        return room
    return min(rule.kv_pages(num_blocks) * facts.page_bytes // facts.block_bytes, facts.max_blocks)


class Life:
    """What happens in one cluster, as a seed says."""

    def __init__(self, cluster: TorchCluster, seed: int) -> None:
        self.cluster = cluster
        self.driver = cluster.driver
        self.rng = np.random.default_rng(seed)
        self.chance = np.random.default_rng((seed, 1))
        """Of what happens as often as the machine's speed lets it, so that `rng` always draws the same."""
        self.asked: list[tuple[SimRequest, asyncio.Task[SimAnswer]]] = []
        self.done: Counter[str] = Counter()
        self.held: dict[str, LayerRange] = {}
        """Layers of each worker before the last change."""

    async def run(self) -> None:
        """Live through the deck, and end with whole workers."""
        for index in self.rng.permutation(len(DECK)):
            await self.step(DECK[index])
        await self.end()

    async def step(self, name: str) -> None:
        await self.cluster.settle()
        if sum(not task.done() for _, task in self.asked) < 4:
            await self.arrive()
        self.note_layers()
        if self.rng.random() < 0.4:  # in the middle of whatever it is
            asyncio.get_running_loop().call_later(float(self.rng.uniform(0, 0.02)), self.cancel_one)
        await getattr(self, name)()
        await self.cluster.settle()
        await self.cluster.check()
        for worker_id, worker in self.cluster.workers.items():
            held = self.held[worker_id]
            assert worker.layers == LayerRange(*WHOLE) or held.covers(worker.layers), (name, held, worker.layers)

    def note_layers(self) -> None:
        self.held = {name: worker.layers for name, worker in self.cluster.workers.items()}

    async def arrive(self) -> None:
        for _ in range(3):
            number = len(self.asked)
            prompt = self.chance.integers(3, 384, int(self.chance.integers(1, MAX_PROMPT)))
            request = SimRequest(f"r{number}", prompt, int(self.chance.integers(20, MAX_OUTPUT)), seed=number)
            self.asked.append((request, asyncio.ensure_future(self.cluster.ask(request))))

    def whole(self) -> list[WorkerReport]:
        return [report for report in self.reports() if report.num_stages == 1]

    def reports(self) -> list[WorkerReport]:
        return [self.driver.reports[name] for name in sorted(self.cluster.workers)]

    def grouped(self) -> list[WorkerReport]:
        """Return the members of one group that stands, in the order of its stages."""
        leaders = [report for report in self.reports() if report.num_stages > 1 and report.stage == 0]
        if not leaders:
            return []
        leader = leaders[int(self.rng.integers(len(leaders)))]
        return sorted(
            (report for report in self.reports() if report.group == leader.worker_id), key=lambda report: report.stage
        )

    def new_group(self) -> FormGroup | None:
        """Return a group of workers that are whole, or of a smaller group and others: each keeps a part of its own.

        It is not a group that stands: a plan for that changes what lies beside, see `reside`.
        """
        return self.group_among(self.whole() + (self.grouped() if self.rng.random() < 0.5 else []))

    def group_among(self, pool: list[WorkerReport]) -> FormGroup | None:
        """Return a group of two or three of them, or None if none is found."""
        for _ in range(20):
            chosen = [pool[i] for i in self.rng.permutation(len(pool))[: int(self.rng.integers(2, 4))]]
            chosen.sort(key=lambda report: (report.layers[0], report.layers[1]))
            if len(chosen) < 2 or not self.is_closed(chosen):
                continue
            cuts = self.rng.choice(np.arange(1, NUM_LAYERS), len(chosen) - 1, replace=False)
            ends = [0, *sorted(cuts.tolist()), NUM_LAYERS]
            ranges = [LayerRange(first, end) for first, end in itertools.pairwise(ends)]
            held = [LayerRange(*report.layers) for report in chosen]
            if held != ranges and all(map(LayerRange.covers, held, ranges)):
                return group_of(chosen, ranges)
        return None

    @staticmethod
    def is_closed(chosen: list[WorkerReport]) -> bool:
        """Whole groups only: who is named brings all of its group along."""
        counts = Counter(report.group for report in chosen if report.num_stages > 1)
        return all(counts[report.group] == report.num_stages for report in chosen if report.num_stages > 1)

    # What may happen

    async def drop(self) -> None:
        await self.carry_out(await self.some_new_group())

    async def regroup(self) -> None:
        """A group that stands drops more, with a worker that is whole."""
        for _ in range(20):
            group = self.group_among(await self.some_group() + self.whole())
            if group is not None and any(len(LayerRange(*stage.held)) < NUM_LAYERS for stage in group.stages):
                await self.carry_out(group)
                return
            await self.restore()
            await self.cluster.settle()
            self.note_layers()

    async def carry_out(self, group: FormGroup) -> None:
        reports = dict(self.driver.reports.items())
        answers = await self.driver.carry_out(group)
        assert set(states(answers)) == {"done"}, answers
        for stage in group.stages:
            found = answers[stage.worker_id]
            assert found is not None
            expected = claimed(reports[stage.worker_id], LayerRange(*stage.layers))
            assert self.cluster.workers[stage.worker_id].memory.num_blocks == expected, "another room than claimed"
        leader = group.stages[0].worker_id
        room = min(claimed(reports[stage.worker_id], LayerRange(*stage.layers)) for stage in group.stages)
        assert self.cluster.workers[leader].num_blocks == room
        held = [LayerRange(*stage.held) for stage in group.stages]
        self.done["drop of a group" if any(len(each) < NUM_LAYERS for each in held) else "drop"] += 1

    async def restore(self, *, only_one: bool = False) -> None:
        names = [report.worker_id for report in await self.some_group()]
        if only_one:
            names = [names[int(self.rng.integers(len(names)))]]
        answers = await self.driver.restore(names)
        assert set(states(answers)) == {"done"}, answers
        self.done["restore of one" if only_one else "restore"] += 1

    async def some_group(self) -> list[WorkerReport]:
        """Return the members of a group that stands, which is formed if there is none."""
        if not self.grouped():
            await self.drop()
            await self.cluster.settle()
        return self.grouped()

    async def some_new_group(self) -> FormGroup:
        """Return a group that can be formed; where there is none, one that stands is dissolved before."""
        while (group := self.new_group()) is None:
            await self.restore()
            await self.cluster.settle()
            self.note_layers()
        return group

    async def load(self) -> None:
        """Parameters come back beside a group, which goes on with fewer blocks."""
        await self.reside(await self.some_group(), LayerRange(*WHOLE))
        self.done["load"] += 1

    async def unload(self) -> None:
        """What has come back becomes memory for KV again, wherever it is."""
        members = await self.some_group()
        await self.reside(members, LayerRange(*WHOLE))
        await self.reside(members, None)
        self.done["unload"] += 1

    async def load_and_restore(self) -> None:
        members = await self.some_group()
        await self.reside(members, LayerRange(*WHOLE))
        assert set(states(await self.driver.restore([report.worker_id for report in members]))) == {"done"}
        self.done["restore of what was loaded"] += 1

    async def reside(self, members: list[WorkerReport], resident: LayerRange | None) -> None:
        rooms = {each.worker_id: claimed(each, LayerRange(*each.layers), resident) for each in members}
        least = min(rooms.values())
        if resident is not None:
            rooms = {each.worker_id: beside_of(each, least, rooms[each.worker_id]) for each in members}
        change = self.driver.unload if resident is None else self.driver.load
        answers = await change(list(rooms), least)
        assert set(states(answers)) == {"done"}, answers
        for name, room in rooms.items():
            worker = self.cluster.workers[name]
            assert worker.device.resident == (resident or worker.layers)
            assert worker.memory.num_blocks == room, "another room than claimed"
        assert self.cluster.workers[members[0].worker_id].num_blocks == min(rooms.values())

    async def fault_beside(self) -> None:
        """The system refuses to map a page while memory is made for parameters, or given back."""
        members, resident = await self.some_group(), LayerRange(*WHOLE)
        name = members[int(self.rng.integers(len(members)))].worker_id
        self.cluster.workers[name].faulty.fail_after(int(self.rng.integers(0, 8)))
        room = min(claimed(each, LayerRange(*each.layers), resident) for each in members)
        self.note_fault("fault beside", name, await self.driver.load([each.worker_id for each in members], room))

    async def restore_one(self) -> None:
        """The others hear that their group is over."""
        await self.restore(only_one=True)

    async def silence(self) -> None:
        """All are prepared, and hear nothing more."""
        await self.abandon(is_said=False)

    async def abandon(self, *, is_said: bool = True) -> None:
        """All are prepared, and hear that nothing comes of it."""
        group = await self.some_new_group()
        self.driver.limit_s = 5.0 if is_said else 0.05
        plan_id, answers = await self.driver.prepare(group)
        self.driver.limit_s = 5.0
        assert set(states(answers)) <= {"prepared", "aborted"}, answers
        if is_said:
            await self.driver.finish(plan_id, [stage.worker_id for stage in group.stages], commit=False)
        self.done["abandon" if is_said else "silence"] += 1

    async def half(self) -> None:
        """Only some hear that it is to be done: their group does not come about."""
        group = await self.some_new_group()
        self.driver.limit_s = 2.0  # whoever is told must not have given up by then
        plan_id, answers = await self.driver.prepare(group)
        self.driver.limit_s = 5.0
        told = [stage.worker_id for stage in group.stages][: len(group.stages) - 1]
        for name in told:
            self.cluster.workers[name].device._limit_s = 0.1
        if set(states(answers)) == {"prepared"}:
            found = set(states(await self.driver.finish(plan_id, told, commit=True)))
            assert found <= {"failed", "aborted"}, "the latter after 2 s of silence: a machine may stand still"
            self.done["half"] += found == {"failed"}
        for name in told:
            self.cluster.workers[name].device._limit_s = STAGE_LIMIT_S

    async def stale(self) -> None:
        """An older planner speaks, and a plan is made for layers that are not held."""
        name = sorted(self.cluster.workers)[int(self.rng.integers(len(self.cluster.workers)))]
        if self.driver.epoch < 2:
            return
        answer = await self.driver.ask(name, CommitPlan(epoch=self.driver.epoch - 1, plan_id=self.driver.epoch))
        assert answer is not None
        if answer.newest_epoch > self.driver.epoch - 1:
            assert answer.state is PlanState.REFUSED
            assert "is over" in answer.reason
        self.done["stale"] += 1

    async def cancel(self) -> None:
        self.cancel_one()

    def cancel_one(self) -> None:
        """A reader that still reads leaves."""
        running = [task for _, task in self.asked if not task.done()]
        if running:
            running[int(self.chance.integers(len(running)))].cancel()
            self.done["cancel"] += 1

    async def kill(self) -> None:
        pool = [report.worker_id for report in await self.some_group()]
        name = pool[int(self.rng.integers(len(pool)))]
        await self.cluster.kill(name)
        await self.cluster.start_worker(name)
        self.done["death of a member"] += 1

    async def fault(self) -> None:
        """The system refuses to map a page, somewhere in a change."""
        group = await self.some_new_group()
        name = group.stages[int(self.rng.integers(len(group.stages)))].worker_id
        self.cluster.workers[name].faulty.fail_after(int(self.rng.integers(0, 8)))
        self.note_fault("fault", name, await self.driver.carry_out(group))

    def note_fault(self, kind: str, name: str, answers: dict[str, PlanAnswer | None]) -> None:
        """Check that a worker whose memory has failed says so, and let it fail no more."""
        faulty = self.cluster.workers[name].faulty
        if faulty.calls_left is None:
            assert states({name: answers[name]}) == ["failed"]
            self.done[kind] += 1
        faulty.calls_left = None

    async def end(self) -> None:
        """Make everybody whole; every text that was not given up is what is said undisturbed."""
        await self.cluster.settle()
        names = [report.worker_id for report in self.reports() if report.num_stages > 1]
        if names:
            assert set(states(await self.driver.restore(names))) == {"done"}
        await self.cluster.settle()
        ended = await asyncio.gather(*(task for _, task in self.asked), return_exceptions=True)
        await self.cluster.check()
        assert all(worker.layers == LayerRange(*WHOLE) for worker in self.cluster.workers.values())
        assert all(isinstance(answer, SimAnswer | asyncio.CancelledError) for answer in ended), ended
        told = [answer for answer in ended if isinstance(answer, SimAnswer)]
        assert {(answer.failure, answer.finish) for answer in told} <= {(None, FinishReason.LENGTH)}
        requests = [replace(answer.request, request_id=f"{answer.request.request_id}-again") for answer in told]
        again = await asyncio.gather(*map(self.cluster.ask, requests))
        assert [answer.tokens for answer in told] == [answer.tokens for answer in again]
        self.done["texts"] += len(told)
        for name, worker in self.cluster.workers.items():
            assert not take_stats(worker.service.engine).num_used_blocks, f"{name} still holds blocks"


_done: dict[int, Counter[str]] = {}


async def live(seed: int, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Each seed is lived once, whichever test asks first."""
    if seed not in _done:
        # workers die here whatever they run: no request is to blame for two deaths
        patch.setattr(history, "MAX_BLAMES", 1000)
        async with TorchCluster(3, patch, memory_bytes=5 * MIB, max_model_len=MAX_PROMPT + MAX_OUTPUT) as cluster:
            life = Life(cluster, seed)
            await life.run()
            life.done["page calls"] = cluster.num_page_calls
            _done[seed] = life.done
    return _done[seed]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
async def test_parameters_and_kv_and_free_pages_are_the_budget_at_every_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await live(seed, monkeypatch)


@pytest.mark.slow
async def test_lives_meet_every_kind_of_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds together; the test above would say little otherwise."""
    total: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        total.update(await live(seed, monkeypatch))
    wanted = (
        *("drop", "drop of a group", "restore", "restore of one", "abandon", "silence", "half", "stale", "cancel"),
        *("load", "unload", "restore of what was loaded", "fault beside"),
        *("death of a member", "fault", "texts", "page calls"),
    )
    assert not [what for what in wanted if not total[what]], total
