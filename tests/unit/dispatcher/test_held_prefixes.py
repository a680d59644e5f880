"""What workers hold, by their sketches, against the sets of names that they really hold."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np
import pytest

from services.dispatcher.policy.prefixes import SENT_S, HeldPrefixes
from shared.ids import WorkerId
from shared.messages.report_parts import PrefixSketch
from shared.prefix_names import NUM_MARKS, RunName, following_names, mark_of, root_name
from shared.prefix_sketch import NO_MARKS, Marks, listed_marks, sketch_of

BLOCK = 4
W0, W1 = WorkerId("w0"), WorkerId("w1")


def names_of(tokens: list[int], salt: str = "") -> list[RunName]:
    return following_names(root_name(salt), np.array(tokens, dtype="<u4").tobytes(), BLOCK)


def marks_of(names: Iterable[RunName]) -> Marks:
    return np.array([mark_of(name) for name in names], dtype=np.uint32)


def sketch(names: set[RunName] | list[RunName], most: int) -> PrefixSketch:
    return sketch_of(marks_of(names), NO_MARKS, most)


def random_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return prompts of which many begin like others."""
    prompts = [[rng.randrange(1000) for _ in range(BLOCK * rng.randint(1, 30))] for _ in range(4)]
    while len(prompts) < count:
        before = rng.choice(prompts)
        kept = BLOCK * rng.randint(0, len(before) // BLOCK)
        prompts.append(before[:kept] + [rng.randrange(1000) for _ in range(BLOCK * rng.randint(1, 10))])
    return prompts


@pytest.mark.parametrize("seed", range(6))
def test_a_sketch_lists_all_marks_below_its_bound_and_no_more_than_it_may(seed: int) -> None:
    rng = np.random.default_rng(seed)
    marks = rng.integers(0, NUM_MARKS, rng.integers(0, 90), dtype=np.uint32)
    made = PrefixSketch.model_validate_json(sketch_of(marks, NO_MARKS, 40).model_dump_json())
    assert len(listed_marks(made)) <= 40
    assert listed_marks(made).tolist() == sorted({mark for mark in marks.tolist() if mark < made.bound})
    assert made.bound == NUM_MARKS or len(set(marks.tolist())) > 40
    assert len(sketch_of(rng.integers(0, NUM_MARKS, 10**5, dtype=np.uint32)).model_dump_json()) < 2800


def shown(names: Sequence[RunName], held: set[RunName], bound: int) -> int:
    """The definition: how many tokens of a prompt a worker is taken to hold.

    It is the middle between what it is seen to hold and what it may hold.
    """
    said = [(count, name in held) for count, name in enumerate(names, 1) if mark_of(name) < bound]
    least = max((count for count, is_held in takewhile(lambda each: each[1], said)), default=0)
    most = min((count - 1 for count, is_held in said if not is_held), default=len(names))
    return (least + most) // 2 * BLOCK if least else 0


@pytest.mark.parametrize("seed", range(12))
def test_of_a_prompt_a_worker_holds_what_its_sketch_can_show_and_half_of_what_that_does_not_deny(seed: int) -> None:
    """Workers hold prefixes of prompts, and of some they have lost blocks in the middle."""
    rng = random.Random(seed)
    prompts, most = random_prompts(rng, 30), rng.choice([10, 60, 10_000])
    prefixes, held, bounds = HeldPrefixes(), dict[WorkerId, set[RunName]](), dict[WorkerId, int]()
    for round_s in range(3):
        for number in range(9):
            worker_id, own = WorkerId(f"w{number}"), set[RunName]()
            if rng.random() < 0.2:
                prefixes.forget(worker_id)
                held.pop(worker_id, None)
                continue
            for prompt in rng.sample(prompts, rng.randint(0, 12)):
                of_prompt = names_of(prompt)
                own |= set(of_prompt[: rng.randint(0, len(of_prompt))])
            own -= set(rng.sample(sorted(own), len(own) // 20))
            held[worker_id], made = own, sketch(own, most)
            bounds[worker_id] = made.bound
            prefixes.take(worker_id, made, BLOCK, float(round_s))
        for prompt in random_prompts(rng, 20) + prompts:
            names = prefixes.names_of(np.array(prompt, dtype="<u4").tobytes(), "")
            assert list(names) == names_of(prompt)
            found = {each: shown(names, own, bounds[each]) for each, own in held.items()}
            assert prefixes.cached(names) == {each: count for each, count in found.items() if count}
        assert not prefixes.cached(names_of(prompts[0], "another tenant"))
        assert len(prefixes) == len(held)
    for worker_id in held:
        prefixes.forget(worker_id)
    assert not prefixes._holders.workers, "nothing is left of workers that are gone"
    assert prefixes.names_of(b"\0" * 400, "") == ()


def test_what_was_sent_counts_for_a_while_whatever_the_worker_says_and_what_it_refused_does_not() -> None:
    prefixes, names = HeldPrefixes(), names_of(list(range(40)))
    for worker_id in (W0, W1):
        prefixes.take(worker_id, sketch([], 10), BLOCK, 0.0)
    prefixes.sent(W0, names, 1.0)
    prefixes.sent(W1, names[:5], 1.0)
    assert prefixes.cached(names) == {W0: 40, W1: 20}
    prefixes.take_back(W1, names[:5])
    assert prefixes.cached(names) == {W0: 40}
    prefixes.take(W0, sketch([], 10), BLOCK, 1.0 + SENT_S)
    assert prefixes.cached(names) == {W0: 40}
    prefixes.take(W0, sketch(names[:3], 10), BLOCK, 1.1 + SENT_S)
    assert prefixes.cached(names) == {W0: 12}
    prefixes.take(W0, sketch(names[:3], 10), BLOCK, 1.2 + SENT_S)
    prefixes.take(W0, sketch([], 10), BLOCK, 1.3 + SENT_S)
    assert not prefixes.cached(names)


def test_where_a_sequence_ended_is_found_beyond_the_bound_of_the_sample() -> None:
    """Of a prompt that goes on behind it, and of none that parts before it."""
    prefixes, names = HeldPrefixes(), names_of(list(range(400)))
    parted = names_of([*range(200), *range(1, 201)])
    own = {*names[:60], *(names_of([number] * 400)[-1] for number in range(300))}
    said = sketch_of(marks_of(own), marks_of([names[59]]), 40)
    below = [count for count, name in enumerate(names, 1) if mark_of(name) < said.bound]
    least, most = max(count for count in below if count <= 60), min(count for count in below if count > 60) - 1
    assert least < 60 < most
    assert mark_of(names[59]) >= said.bound
    prefixes.take(W0, sketch(own, 40), BLOCK, 0.0)
    assert prefixes.cached(names) == {W0: (least + most) // 2 * BLOCK}
    prefixes.take(W0, said, BLOCK, 0.0)
    assert prefixes.cached(names) == {W0: (60 + most) // 2 * BLOCK}
    assert prefixes.cached(parted) == {W0: shown(parted, own, said.bound)}
    assert len(listed_marks(said)) <= 40
    prefixes.forget(W0)
    assert not prefixes._holders.workers


@pytest.mark.parametrize("said", [None, PrefixSketch(marks="no base64"), PrefixSketch(marks="AAAA")])
def test_a_worker_that_says_nothing_or_nonsense_or_has_other_blocks_holds_nothing(said: PrefixSketch | None) -> None:
    prefixes, names = HeldPrefixes(), names_of(list(range(40)))
    prefixes.take(W0, sketch(names, 99), BLOCK, 0.0)
    prefixes.take(W1, sketch(names, 99), BLOCK, 0.0)
    prefixes.take(W1, said, BLOCK, 1.0)
    assert prefixes.cached(names) == {W0: 40}
    prefixes.take(W1, sketch(names, 99), 2 * BLOCK, 1.0)
    assert prefixes.cached(names) == {W0: 40}
    prefixes.forget(W0)
    prefixes.take(W0, sketch(names, 99), 0, 1.0)
    assert prefixes.names_of(bytes(400), "") == ()
