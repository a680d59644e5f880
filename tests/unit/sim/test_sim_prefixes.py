"""Conversations whose prompts share prefixes: what they share, what they never do, and that a seed says it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from sim.worker import SimWorkerParams
from sim.workload.prefixes import (
    AGENTS,
    CHATS,
    DOCUMENTS,
    FIRST_TOKEN_ID,
    NEWS,
    VOCAB_SIZE,
    News,
    PrefixLoad,
    SimConversation,
)
from tests.support.sim_clusters import COST

LOADS = {"chats": CHATS, "agents": AGENTS, "documents": DOCUMENTS, "news": NEWS}
BLOCK_SIZE = 16
every_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


def some(load: PrefixLoad, seed: int = 3, rate_per_s: float = 1.0) -> list[SimConversation]:
    return load.conversations(rate_per_s, 60.0, seed)


def answers_of(conversation: SimConversation) -> list[list[int]]:
    """Answers as long as asked for, of ids that no prompt has."""
    return [[number] * turn.num_output for number, turn in enumerate(conversation.turns)]


def said_by(conversation: SimConversation) -> tuple[bytes, ...]:
    return (conversation.opening.tobytes(), *(turn.text.tobytes() for turn in conversation.turns))


def blocks_of(tokens: Sequence[np.ndarray]) -> set[bytes]:
    """Return the content of all full blocks, wherever they begin."""
    found: set[bytes] = set()
    for each in tokens:
        windows = np.lib.stride_tricks.sliding_window_view(each, BLOCK_SIZE) if each.size >= BLOCK_SIZE else each[:0]
        found |= {window.tobytes() for window in windows}
    return found


@every_load
def test_a_seed_says_everything(load: PrefixLoad) -> None:
    first, again, other = some(load), some(load), some(load, seed=4)
    assert list(map(said_by, first)) == list(map(said_by, again))
    assert [(each.begin_s, each.opening_index) for each in first] == [(e.begin_s, e.opening_index) for e in again]
    assert [[(t.num_output, t.think_s) for t in each.turns] for each in first] == [
        [(t.num_output, t.think_s) for t in each.turns] for each in again
    ]
    assert not {each.turns[0].text.tobytes() for each in first} & {each.turns[0].text.tobytes() for each in other}


@pytest.mark.parametrize("load", [CHATS, AGENTS, DOCUMENTS], ids=["chats", "agents", "documents"])
def test_another_rate_changes_when_conversations_begin_and_nothing_else(load: PrefixLoad) -> None:
    few, many = some(load), some(load, rate_per_s=4.0)
    assert 0 < len(few) < len(many)
    assert list(map(said_by, few)) == list(map(said_by, many[: len(few)]))


@every_load
def test_each_prompt_begins_with_the_one_before_and_its_answer(load: PrefixLoad) -> None:
    for conversation in some(load):
        answers = answers_of(conversation)
        before = conversation.opening
        for number, turn in enumerate(conversation.turns):
            prompt = conversation.prompt(answers[:number])
            assert np.array_equal(prompt, np.concatenate([before, turn.text]))
            before = np.concatenate([prompt, np.array(answers[number], dtype=np.int32)])
        assert before.size == conversation.num_tokens


@every_load
def test_every_conversation_fits_and_has_a_turn(load: PrefixLoad) -> None:
    found = some(load, rate_per_s=8.0)
    assert max(each.num_tokens for each in found) <= load.max_tokens
    assert min(len(each.turns) for each in found) == 1
    assert max(len(each.turns) for each in found) <= load.max_turns
    assert all(each.turns[0].think_s == 0 for each in found)
    assert all(0 < turn.think_s <= load.pauses.max_s for each in found for turn in each.turns[1:])


def test_a_conversation_ends_before_a_turn_that_does_not_fit() -> None:
    cut, whole = some(replace(CHATS, max_tokens=1500)), some(CHATS)
    ended = [(a, b) for a, b in zip(cut, whole, strict=True) if len(a.turns) < len(b.turns)]
    assert ended
    for short, long in ended:
        following = long.turns[len(short.turns)]
        assert short.num_tokens + following.text.size + following.num_output > 1500


@pytest.mark.parametrize("load", [AGENTS, DOCUMENTS], ids=["agents", "documents"])
def test_openings_are_shared_exactly_and_the_popular_ones_by_most(load: PrefixLoad) -> None:
    found, openings = some(load, rate_per_s=16.0), load.openings(60.0, 3)
    assert all(np.array_equal(each.opening, openings[each.opening_index]) for each in found)
    asked = np.bincount([each.opening_index for each in found], minlength=load.num_openings)
    assert asked[0] == asked.max() > 2 * np.median(asked)
    assert len({opening[:BLOCK_SIZE].tobytes() for opening in openings}) == load.num_openings


def test_the_newest_document_is_asked_for_by_its_share_and_by_nobody_before_or_after() -> None:
    load = replace(NEWS, news=News(share=0.6, every_s=20.0))
    found, openings = some(load, rate_per_s=16.0), load.openings(60.0, 3)
    assert len(openings) == load.num_openings + 3
    new = [each for each in found if each.opening_index >= load.num_openings]
    assert all(each.opening_index - load.num_openings == each.begin_s // 20.0 for each in new)
    assert len(new) / len(found) == pytest.approx(0.6, abs=0.05)
    assert all(np.array_equal(each.opening, openings[each.opening_index]) for each in new)


@every_load
def test_nothing_else_is_shared(load: PrefixLoad) -> None:
    """No block of text occurs twice, wherever it begins: not in other texts, nor in openings."""
    found = some(load, rate_per_s=0.5)
    seen = blocks_of(load.openings(60.0, 3)[:8])
    for conversation in found:
        for turn in conversation.turns:
            blocks = blocks_of([turn.text])
            assert not blocks & seen
            seen |= blocks


def test_without_openings_a_conversation_begins_with_its_own_text() -> None:
    alone = some(replace(CHATS, num_openings=0))
    assert all(not each.opening.size for each in alone)
    assert len({each.prompt([])[:BLOCK_SIZE].tobytes() for each in alone}) == len(alone)


def test_token_ids_are_those_of_modelled_workers() -> None:
    worker = SimWorkerParams("w0", COST, num_blocks=1)
    assert (worker.first_token_id, worker.vocab_size) == (FIRST_TOKEN_ID, VOCAB_SIZE)
    ids = np.concatenate([turn.text for each in some(CHATS) for turn in each.turns])
    assert FIRST_TOKEN_ID <= ids.min() < ids.max() < VOCAB_SIZE
