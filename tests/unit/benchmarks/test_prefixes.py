"""Placements under conversations: what a small run conserves, and that hits are those of an oracle at most."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.baseline_placements import ASKING, BASELINES, placement_of
from benchmarks.prefixes import (
    CASES,
    HEAD,
    Change,
    Window,
    cluster_of,
    counters,
    hold_all,
    main,
    observe,
    row_of,
)
from services.dispatcher.policy.placement import Placed
from shared.errors import StartupError
from sim.catalog.instance import find_instance
from sim.cluster import SimCluster
from sim.experiment.setup import BLOCK_SIZE
from sim.requests import SimAnswer, SimRequest
from sim.virtual_time import run as run_virtually
from sim.workload.lengths import find_lengths
from sim.workload.prefixes import Pauses, SimConversation

SMALL: dict[str, dict[str, Any]] = {
    "chats": {"mean_turns": 3.0, "max_turns": 5, "lengths": find_lengths("50x20"), "pauses": Pauses(0.3, 1.0, 1.0)},
    "agents": {
        "num_openings": 2,
        "pauses": Pauses(0.3, 1.0, 1.0),
        "opening": find_lengths("300x1").input,
        "lengths": find_lengths("20x10"),
    },
    "documents": {"num_openings": 3, "opening": find_lengths("300x1").input, "lengths": find_lengths("20x10")},
    "news": {"num_openings": 3, "opening": find_lengths("300x1").input, "lengths": find_lengths("20x10")},
}
"""What differs from the loads' own parameters."""
INSTANCE = find_instance("qwen2.5-14b", "a800")
every_small = pytest.mark.parametrize("name", SMALL)
every_placement = pytest.mark.parametrize("placement", ["least-loaded", *BASELINES])


class Story:
    """One small run to its last answer: who was placed where, in order, and what came back."""

    def __init__(self, name: str, placement: str, *, num_workers: int = 2, num_blocks: int = 2000) -> None:
        self.case = replace(CASES[name], load=replace(CASES[name].load, **SMALL[name]))
        self.conversations = self.case.load.conversations(1.5, 8.0, seed=1)
        self.placed: list[tuple[int, str]] = []
        """Conversation and worker."""
        self.asked: dict[int, list[tuple[SimRequest, SimAnswer]]] = defaultdict(list)
        """By conversation."""
        params = cluster_of(num_workers, replace(INSTANCE, kv_tokens=num_blocks * BLOCK_SIZE), self.case, placement)
        self._rule = params.placement
        run_virtually(self._run(SimCluster, replace(params, placement=self._place)))

    async def _run(self, cluster_type: type[SimCluster], params: Any) -> None:
        async with cluster_type(params) as cluster:
            await hold_all(cluster, self.conversations, self._on_answer)
            self.counted = counters(cluster.workers)
            cluster.check_idle()

    def _place(self, *args: Any, **kwargs: Any) -> Placed | None:
        assert self._rule is not None
        placed, asking = self._rule(*args, **kwargs), ASKING.get()
        if placed is not None and asking is not None:
            self.placed.append((asking.index, placed.worker_id))
        return placed

    def _on_answer(self, conversation: SimConversation, request: SimRequest, answer: SimAnswer) -> None:
        self.asked[conversation.index].append((request, answer))

    def oracle(self) -> dict[str, tuple[int, int]]:
        """Return of each worker the prompt tokens that it was asked for, and those that unlimited memory would find.

        Found are full blocks of what was there before. The last token of a prompt is computed in any case, and that of
        an answer is never.
        """
        held: dict[str, set[bytes]] = defaultdict(set)
        counted: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        rounds = {index: iter(asked) for index, asked in self.asked.items()}
        for index, worker_id in self.placed:
            request, answer = next(rounds[index])
            whole = np.concatenate([request.prompt, np.array(answer.tokens, dtype=np.int32)])
            prefixes = [whole[:end].tobytes() for end in range(BLOCK_SIZE, whole.size, BLOCK_SIZE)]
            num_prompt, num_found = request.prompt.size, 0
            for prefix in prefixes[: (num_prompt - 1) // BLOCK_SIZE]:
                if prefix not in held[worker_id]:
                    break
                num_found += BLOCK_SIZE
            held[worker_id].update(prefixes)
            before = counted[worker_id]
            counted[worker_id] = before[0] + num_prompt, before[1] + num_found
        return counted


@cache
def story_of(name: str, placement: str) -> Story:
    """A story that nobody changes."""
    return Story(name, placement)


def by_worker(story: Story) -> list[tuple[int, int]]:
    """What the workers have counted: prompt tokens that were looked up, and found."""
    return [(int(queries), int(hits)) for queries, hits in story.counted[:, :2]]


@every_small
@every_placement
def test_every_turn_is_answered_and_every_prompt_is_all_that_was_said(name: str, placement: str) -> None:
    story = story_of(name, placement)
    assert len(story.placed) == sum(len(each.turns) for each in story.conversations)
    for conversation in story.conversations:
        asked = story.asked[conversation.index]
        assert [len(answer.tokens) for _, answer in asked] == [turn.num_output for turn in conversation.turns]
        answers = [answer.tokens for _, answer in asked]
        for number, (request, _) in enumerate(asked):
            assert np.array_equal(request.prompt, conversation.prompt(answers[:number]))


@every_small
@every_placement
def test_workers_find_what_an_oracle_finds(name: str, placement: str) -> None:
    """With memory for everything, exactly that: prompts, and the answers of turns before."""
    story = story_of(name, placement)
    bound = story.oracle()
    assert by_worker(story) == [bound[f"worker-{i}"] for i in range(2)]
    assert 0 < story.counted[:, 1].sum() < story.counted[:, 0].sum()


@every_placement
def test_workers_of_little_memory_find_less_than_the_oracle(placement: str) -> None:
    """Room for one document at a time."""
    story = Story("documents", placement, num_blocks=30)
    bound, counted = story.oracle(), by_worker(story)
    for (queries, hits), (asked, most) in zip(counted, (bound[f"worker-{i}"] for i in range(2)), strict=True):
        assert queries == asked
        assert hits <= most
    assert sum(hits for _, hits in counted) < sum(most for _, most in bound.values())


def homes(story: Story, keys: dict[int, int]) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for index, worker_id in story.placed:
        found[keys[index]].add(worker_id)
    return found


@every_small
def test_what_session_affinity_keeps_together_goes_to_one_worker(name: str) -> None:
    story = story_of(name, "session-affinity")
    keys = {each.index: story.case.affinity(each) for each in story.conversations}
    assert {len(workers) for workers in homes(story, keys).values()} == {1}
    assert len({worker_id for _, worker_id in story.placed}) == 2
    apart = homes(story_of(name, "round-robin"), keys)
    assert max(len(workers) for workers in apart.values()) == 2


def test_round_robin_asks_one_after_the_other() -> None:
    story = Story("agents", "round-robin", num_workers=3)
    order = [worker_id for _, worker_id in story.placed]
    assert order == [f"worker-{i % 3}" for i in range(len(order))]


def test_an_unknown_placement_is_refused_with_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match="no placement 'session-afinity'"):
        placement_of("session-afinity", CASES["chats"].affinity)
    monkeypatch.setattr("sys.argv", ["prefixes", "--placements", "session-afinity"])
    with pytest.raises(SystemExit):
        main()
    assert "Did you mean session-affinity?" in capsys.readouterr().err


def test_a_run_is_its_window_and_one_seed_has_one_output() -> None:
    """What is under way at the end is cut off, and leaves nothing behind."""
    case = replace(CASES["chats"], load=replace(CASES["chats"].load, **SMALL["chats"]))
    rows: list[Sequence[str]] = []
    for _ in range(2):
        params = cluster_of(2, INSTANCE, case, "least-loaded")
        conversations = case.load.conversations(3.0, 4.0, seed=0)
        run = run_virtually(observe(params, conversations, Window(1.0, 4.0)))
        rows.append(row_of(2, "least-loaded", [run]))
        assert 0 < len(run.ttft_s) < sum(len(each.turns) for each in conversations)
        assert min(run.ttft_s) > 0
    assert rows[0] == rows[1]
    assert len(rows[0]) == len(HEAD)


@pytest.mark.parametrize(("change", "num_ids"), [(Change.JOIN, 3), (Change.RESTART, 2)])
def test_workers_that_come_anew_count_under_their_ids(change: Change, num_ids: int) -> None:
    """Who is restarted has counted before, and goes on counting."""
    case = replace(CASES["chats"], load=replace(CASES["chats"].load, **SMALL["chats"]))
    conversations = case.load.conversations(3.0, 8.0, seed=0)
    params = replace(cluster_of(2, INSTANCE, case, "prefix-aware@100"), num_dispatchers=3)
    seen = run_virtually(observe(params, conversations, Window(2.0, 8.0), change=change))
    assert seen.counted.shape == (num_ids, 6)
    assert (seen.counted[:, 0] > 0).all()
    assert (seen.counted[:, 1] <= seen.counted[:, 0]).all()
