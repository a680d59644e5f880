"""BROS's packing: against loops that do what its listing says, and each deviation by what would happen without it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.scheduling.residual_packing import LEAST_CUT, BatchRoom, Packed, RowWork, pack
from shared.phase_cost import PhaseCost, StepCost

COST = StepCost(PhaseCost(1e-4, 1e-8, 2e-3), PhaseCost(5e-4, 1e-9, 5e-3))
PER_TOKEN = StepCost(PhaseCost(1e-3, 0.0, 0.0), PhaseCost(1e-3, 0.0, 0.0))
"""A millisecond for each token."""
ROOM = BatchRoom(8, 1000, 0, 1e-3, period_s=0.01, late_step_s=0.05)


@dataclass(frozen=True, slots=True)
class One:
    """A request: tokens to compute, the context with them, blocks that it lacks, blocks on the host."""

    num_tokens: int = 1
    num_context: int = 100
    num_blocks: int = 0
    num_on_host: int = 0
    residual_s: float = inf


def work(ones: list[One]) -> RowWork:
    columns = [np.array([getattr(one, name) for one in ones], dtype=np.float64) for name in One.__slots__[:4]]
    return RowWork(columns[0] == 1, *columns)


def packed(real_time: list[One], best_effort: list[One], cost: StepCost = COST, room: BatchRoom = ROOM) -> Packed:
    residual_s = np.array([one.residual_s for one in real_time], dtype=np.float64)
    return pack(work(real_time), residual_s, work(best_effort), cost, room)


@dataclass
class Loops:
    """The listing, request by request, with the deviations of the module."""

    cost: StepCost
    room: BatchRoom
    limit_s: float = inf
    batch: list[One] = field(default_factory=list)
    num_cut: int | None = None

    def lasts_s(self, ones: list[One]) -> float:
        prompts = [one for one in ones if one.num_tokens > 1]
        decodes = [one for one in ones if one.num_tokens == 1]
        totals = [
            float(sum(getattr(one, name) for one in some))
            for some in (prompts, decodes)
            for name in ("num_tokens", "num_context")
        ]
        return max(self.cost.of(*totals), self.room.block_copy_s * sum(one.num_on_host for one in ones))

    def fitting(self) -> int:
        if self.limit_s == inf:
            return 2**30
        count = 0
        while self.lasts_s([*self.batch, One(count + 1, count + 1)]) <= self.limit_s and count < 2**13:
            count += 1
        return count

    def pack(self, real_time: list[One], best_effort: list[One]) -> tuple[list[int], list[int], bool]:
        late = [i for i, one in enumerate(real_time) if one.residual_s < self.lasts_s([one])]
        early = [i for i in range(len(real_time)) if i not in late]
        if real_time:
            self.limit_s = real_time[early[0]].residual_s if early else self.room.late_step_s
        num_blocks = self.room.num_free_blocks + self.room.num_lent_blocks
        chosen = self.take(real_time, early, self.room.num_rows - bool(late), num_blocks, cuts=not late)
        too_long = self.stopped == "time"
        num_early = len(chosen)
        chosen += self.take(real_time, late, self.room.num_rows - num_early, num_blocks)
        too_long |= self.stopped == "time"
        if late and len(chosen) == num_early:
            chosen.append(self.force(real_time, late[0]))
        elif early and not chosen:
            chosen.append(self.force(real_time, early[0]))
            num_early = 1
        added = self.add(real_time, best_effort, chosen, num_early)
        return chosen, added, too_long

    def take(
        self, ones: list[One], places: list[int], num_rows: int, num_blocks: int, *, cuts: bool = True
    ) -> list[int]:
        taken: list[int] = []
        self.stopped = ""
        for place in places:
            if len(taken) == max(num_rows, 0):
                break
            one = ones[place]
            if sum(each.num_blocks for each in [*self.batch, one]) > num_blocks:
                self.stopped = "blocks"
                break
            if self.lasts_s([*self.batch, one]) > self.limit_s:
                self.stopped = "time"
                fits = self.fitting()
                if (
                    cuts
                    and one.num_tokens > 1
                    and self.lasts_s([one]) > self.limit_s
                    and fits >= min(LEAST_CUT, one.num_tokens)
                ):
                    self.num_cut = min(fits, one.num_tokens)
                    taken.append(place)
                    self.batch.append(one)
                break
            taken.append(place)
            self.batch.append(one)
        return taken

    def force(self, ones: list[One], place: int) -> int:
        if ones[place].num_tokens > LEAST_CUT:
            self.num_cut = min(max(self.fitting(), LEAST_CUT), ones[place].num_tokens)
        self.batch.append(ones[place])
        return place

    def add(self, real_time: list[One], best_effort: list[One], chosen: list[int], num_early: int) -> list[int]:
        added: list[int] = []
        num_blocks = max(self.room.num_free_blocks, sum(one.num_blocks for one in self.batch))
        for place, one in enumerate(best_effort):
            if self.num_cut is not None:
                break
            num_rows = self.room.num_rows - len(self.batch)
            if self.take(best_effort, [place], num_rows, num_blocks):
                added.append(place)
                continue
            if self.stopped == "blocks" or not num_early:
                break
            victim = real_time[chosen[num_early - 1]]
            without = list(self.batch)
            without.remove(victim)
            without.append(one)
            if sum(each.num_blocks for each in without) > num_blocks:
                break
            if self.lasts_s(without) > min(self.limit_s, victim.residual_s - self.room.period_s):
                break
            self.batch, num_early = without, num_early - 1
            del chosen[num_early]
            added.append(place)
        if not self.batch and best_effort:
            added.append(self.force(best_effort, 0))
        return added


ONES = st.builds(
    One,
    st.one_of(st.just(1), st.integers(2, 4000)),
    st.integers(1, 4000),
    st.integers(0, 40),
    st.one_of(st.just(0), st.integers(1, 60)),
    st.floats(-0.2, 0.4),
)
ROOMS = st.builds(
    BatchRoom,
    st.integers(1, 12),
    st.integers(0, 120),
    st.integers(0, 60),
    st.just(1e-3),
    st.floats(0, 0.1),
    st.just(0.05),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(ONES, max_size=14), st.lists(ONES, max_size=14), ROOMS)
def test_it_does_what_the_listing_says_request_by_request(
    real_time: list[One], best_effort: list[One], room: BatchRoom
) -> None:
    def whole(one: One) -> One:
        return replace(one, num_context=max(one.num_context, one.num_tokens))

    real_time = sorted(map(whole, real_time), key=lambda one: one.residual_s)
    best_effort = list(map(whole, best_effort))
    loops = Loops(COST, room)
    chosen, added, is_too_long = loops.pack(real_time, best_effort)
    found = packed(real_time, best_effort, room=room)
    assert (found.real_time, found.best_effort) == (chosen, added)
    assert found.is_too_long == is_too_long
    assert (found.num_cut is None) == (loops.num_cut is None)
    if loops.num_cut is not None and found.num_cut is not None:
        assert found.num_cut == pytest.approx(loops.num_cut, abs=1)


@settings(deadline=None, max_examples=200)
@given(st.lists(ONES, max_size=14), st.lists(ONES, max_size=14), ROOMS)
def test_batches_keep_their_bounds_and_are_never_empty(
    real_time: list[One], best_effort: list[One], room: BatchRoom
) -> None:
    real_time.sort(key=lambda one: one.residual_s)
    found = packed(real_time, best_effort, room=room)
    num_rows = len(found.real_time) + len(found.best_effort)
    assert num_rows <= room.num_rows
    assert (num_rows > 0) == bool(real_time or best_effort)
    assert len(set(found.real_time)) == len(found.real_time)
    late = [i for i, one in enumerate(real_time) if one.residual_s < Loops(COST, room).lasts_s([one])]
    if late:
        assert set(late) & set(found.real_time), "one of those who are late has a place"


def test_without_a_residual_for_one_step_more_nobody_is_replaced() -> None:
    """As printed best effort takes the places of all four, in each step anew, and no conversation goes on."""
    room = replace(ROOM, num_rows=4, period_s=0.02)
    documents = [One(num_context=10)] * 10
    urgent = [One(residual_s=each) for each in (0.010, 0.011, 0.012, 0.013)]
    found = packed(urgent, documents, PER_TOKEN, room)
    assert (found.real_time, found.best_effort) == ([0, 1, 2, 3], [])
    patient = [replace(one, residual_s=one.residual_s + 0.012) for one in urgent]  # 4 ms for this step, 20 for one more
    found = packed(patient, documents, PER_TOKEN, room)
    assert (found.real_time, found.best_effort) == ([0, 1], [0, 1]), "those who can be in time in the step after too"


def test_steps_go_on_for_everybody_whatever_their_limits() -> None:
    """Six conversations that may be left out of one step in two, and documents without end: all keep their limits."""
    room = replace(ROOM, num_rows=8, period_s=0.008)
    now_s, last_s, longest_s, num_documents = 0.0, [0.0] * 6, 0.0, 0
    for _ in range(300):
        order = sorted(range(6), key=last_s.__getitem__)
        talk = [One(residual_s=0.02 - (now_s - last_s[i])) for i in order]
        found = packed(talk, [One()] * 20, PER_TOKEN, room)
        now_s += 0.001 * (len(found.real_time) + len(found.best_effort))
        num_documents += len(found.best_effort)
        for place in found.real_time:
            longest_s = max(longest_s, now_s - last_s[order[place]])
            last_s[order[place]] = now_s
    assert longest_s <= 0.02
    assert num_documents > 300, "what conversations leave is theirs"


def test_who_is_late_does_not_make_steps_short_and_comes_after_who_is_not() -> None:
    late, early = One(residual_s=-1.0), One(residual_s=0.015)
    found = packed([late, late, early], [One()] * 9, PER_TOKEN, ROOM)
    assert found.real_time == [2, 0, 1]
    assert len(found.best_effort) == 5, "the limit is that of who can be in time"


def test_one_who_is_late_has_a_place_in_each_batch() -> None:
    """Else who is late once is so for ever, where there are always enough others."""
    others = [One(residual_s=0.02 + i / 1000) for i in range(9)]
    found = packed([One(residual_s=-1.0), *others], [], PER_TOKEN, replace(ROOM, num_rows=4))
    assert found.real_time == [1, 2, 3, 0]
    prompt = One(num_tokens=500, num_context=500, residual_s=-1.0)
    found = packed([prompt, *others], [], PER_TOKEN, replace(ROOM, num_rows=10, late_step_s=1.0))
    assert found.real_time[-1] == 0
    assert found.num_cut is not None
    assert found.num_cut == LEAST_CUT, "of a prompt that does not fit beside them a little is computed"


def test_where_all_are_late_a_step_lasts_for_a_limit_per_token() -> None:
    found = packed([One(residual_s=-1.0)] * 8, [One()] * 8, PER_TOKEN, replace(ROOM, num_rows=16, late_step_s=0.0101))
    assert (len(found.real_time), len(found.best_effort)) == (8, 2)


def test_without_real_time_best_effort_has_all_the_time() -> None:
    found = packed([], [One(num_tokens=4000, num_context=4000)] * 3, PER_TOKEN)
    assert (found.best_effort, found.num_cut) == ([0, 1, 2], None)


def test_a_prompt_that_takes_longer_than_anybody_has_is_cut() -> None:
    """As printed it would wait until nobody decodes."""
    decodes = [One(residual_s=0.1)] * 2
    document = One(num_tokens=1000, num_context=1000)
    found = packed(decodes, [document, One()], PER_TOKEN)
    assert (found.real_time, found.best_effort, found.num_cut) == ([0, 1], [0], 98)
    chat = replace(document, residual_s=2.0)
    found = packed([*decodes, chat], [One()], PER_TOKEN)
    assert (found.real_time, found.best_effort, found.num_cut) == ([0, 1, 2], [], 98)


def test_a_prompt_that_fits_another_step_waits_for_it() -> None:
    found = packed([One(residual_s=0.1), One(num_tokens=90, num_context=90, residual_s=0.2)] * 1, [], PER_TOKEN)
    assert found.real_time == [0, 1]
    two = [One(residual_s=0.1), *[One(num_tokens=90, num_context=90, residual_s=0.2)] * 2]
    found = packed(two, [], PER_TOKEN)
    assert (found.real_time, found.num_cut, found.is_too_long) == ([0, 1], None, True)


def test_best_effort_takes_no_block_that_real_time_needs_and_real_time_takes_its() -> None:
    room = replace(ROOM, num_free_blocks=5, num_lent_blocks=3)
    talk = [One(num_blocks=4, residual_s=1.0), One(num_blocks=4, residual_s=1.0), One(num_blocks=1, residual_s=1.0)]
    assert packed(talk, [], room=room).real_time == [0, 1], "8 of 8 blocks"
    found = packed(talk[:1], [One(num_blocks=1), One(num_blocks=1), One()], room=room)
    assert found.best_effort == [0], "who lacks one ends the packing"
    assert packed(talk[:2], [One()], room=room).best_effort == [0], "who needs none goes on"


def test_what_lies_on_the_host_takes_as_long_as_it_takes_to_bring_it() -> None:
    """Copies run beside the computing: the longer one of the two counts."""
    talk = [One(residual_s=0.010)]
    brought = One(num_on_host=9)
    assert packed(talk, [brought], PER_TOKEN).best_effort == [0]
    assert packed(talk, [replace(brought, num_on_host=11)], PER_TOKEN).best_effort == []


def test_a_document_that_lacks_blocks_is_chosen_where_nobody_else_is() -> None:
    """The policy has others give way for it: else nobody would ever be."""
    found = packed([], [One(num_blocks=9), One(num_blocks=9)], room=replace(ROOM, num_free_blocks=4))
    assert (found.best_effort, found.num_cut) == ([0], None)
