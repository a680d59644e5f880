"""Answers that think on simulated workers: forced ends, and readers who are the same wherever their answer goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from services.dispatcher.session.standing import reader_qoe, slack_s
from services.worker.engine.describe import describe
from shared.ids import RequestId
from shared.qoe import answer_qoe
from shared.types import ReaderTarget
from sim.cluster import SimCluster
from sim.devices.channel import ModelledLink
from sim.experiment.run import run_workload
from sim.experiment.setup import build_cluster
from sim.requests import CLOSING_ID, SimRequest
from sim.scenarios.files import load_scenario
from sim.scenarios.parts import ThinkingLoad
from tests.support.sim_clusters import check_answers, cluster_of

pytestmark = pytest.mark.virtual_time
READER = ReaderTarget(ttft_s=0.3, speed_tokens_per_s=15.0, thinking_speed_tokens_per_s=12.0)
LATE_S = 0.02
"""By which a worker and its dispatcher may see one token."""


def requests(count: int) -> list[SimRequest]:
    """Return requests of which every other one thinks: for its first token only, for some, or for all but few."""
    random = np.random.default_rng(5)
    return [
        SimRequest(
            f"r{i}",
            random.integers(300, 31_000, int(random.integers(50, 200))),
            num_output=int(random.integers(100, 160)),
            seed=i,
            qoe=READER,
            num_thinking=(0, 1, 0, 40, 0, 99)[i % 6],
        )
        for i in range(count)
    ]


async def test_a_reader_is_the_same_for_workers_and_dispatcher_before_and_after_a_move() -> None:
    """A worker gives its requests away, some of which think at that moment, some did before, and some never do."""
    params = replace(cluster_of(3, 1200, kv_bytes_per_token=100_000), link=ModelledLink(0.0001, 3e9))
    async with SimCluster(params) as cluster:
        asked = [asyncio.ensure_future(cluster.ask(request)) for request in requests(24)]
        seen: set[tuple[bool, bool]] = set()
        for pause_s in (1.0, 0.3, 0.3, 0.4):
            await asyncio.sleep(pause_s)
            if pause_s == 1.0:
                await cluster.workers[0].service.drain(5.0)
                assert not cluster.workers[0].service.engine.table.num_sequences
            now_s = asyncio.get_running_loop().time()
            sessions = {session.request.request_id: session for session in cluster.dispatcher.sessions.table}
            for worker in cluster.workers:
                for row in describe(worker.service.engine, now_s):
                    session = sessions[RequestId(str(row["request_id"]))]
                    seen.add((session.thinks, session.reading.num_thought > 0))
                    assert row["slack_s"] == pytest.approx(slack_s(session, now_s), abs=LATE_S)
                    assert row["qoe"] == pytest.approx(reader_qoe(session, now_s), abs=LATE_S)
        answers = await asyncio.gather(*asked)
        check_answers(cluster, answers)
    assert seen == {(False, False), (True, False), (False, True)}
    for answer in answers:
        num_thinking = answer.request.num_thinking
        assert [i for i, token in enumerate(answer.tokens) if token == CLOSING_ID] == [num_thinking - 1] * (
            num_thinking > 0
        )
        expected = answer_qoe(np.array(answer.delivered_s), READER.ttft_s, READER.speed_tokens_per_s, num_thinking)
        assert answer.qoe == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_half_of_the_readers_thinking_cost_the_others_nothing() -> None:
    """The command of docs/results/answers.md, on a part of its load: the worst reader, and the others' good ones."""
    scenario = load_scenario("burst-demo").with_overrides(duration_s=110.0, upscale=0.9)
    scenario = scenario.model_copy(update={"thinking": ThinkingLoad(share=0.5, tokens=300)})
    told = scenario.workload(0)
    untold = replace(told, num_thinking=np.zeros_like(told.num_thinking))
    found = {}
    for name, system, load in (("fcfs", "fcfs", told), ("told", "sluice", told), ("untold", "sluice", untold)):
        records = run_workload(build_cluster(scenario, system, load), load).records
        found[name] = replace(records, num_thinking=told.num_thinking)
    others = told.num_thinking == 0
    assert np.percentile(found["told"].qoe, 1) > np.percentile(found["fcfs"].qoe, 1)
    good = {name: (each.qoe[others] >= 0.95).mean() for name, each in found.items()}
    assert good["told"] > good["fcfs"] + 0.1
    assert good["told"] >= good["untold"] - 0.01
