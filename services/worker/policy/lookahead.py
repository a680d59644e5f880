"""Lookahead scheduling for a pipeline: its lanes take turns, and each turn computes as much as every other.

    call        0          1          2          3                what a turn holds: its share of the decodes, and
    lane        0          1          0          1                chunks of its own prompts worth the same work in
    decodes     a b c      d e        a b c      d e              every turn (`microbatch.py`)
    prefill     R0 ... R0  R1 . R2 .  R0  R3 ..  R2 ... R2

Everything that is queued and fits the memory is dealt out to the lanes ahead; what this call hands out is the next
microbatch of the lane whose turn it is. While nothing comes, ends or gives way, later calls go on with what was dealt;
else new ones are dealt to the lanes with the least work, the last ones move to where a lane would end early, and the
shares are taken anew. When nothing is queued the decodes alone are split. With one lane it is `chunked`.

Source: KunServe, version 2, section 4.3; deviations of the formation: `microbatch.py`. Memory is given, and taken, as
in `chunked`. Of a prompt that waits the whole work counts, as if none of it was cached.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.worker.policy.blocks_math import ceil_div, num_known
from services.worker.policy.chunked import ChunkedScheduler
from services.worker.policy.plan import StepPlan
from services.worker.policy.rounds import Room, Rounds, deal
from services.worker.policy.view import I32, SchedulerOutput, SchedulerView
from services.worker.policy.work import Work

LOOK_ROUNDS = 4
"""Rounds for which prompts are dealt out ahead; of those behind only the sum of their work counts."""
MIN_LOOK_PER_LANE = 16
"""Prompts per lane that are dealt out ahead in any case."""


@dataclass(frozen=True, slots=True)
class _Queue:
    """All prompts that are to be computed and fit the memory: begun ones, then parked ones, first come first."""

    rows: list[int]
    names: list[int]
    """`Columns.order`: a sequence's number for good."""
    work_s: list[float]
    """What each has left, once its batch is back if it is in one."""
    num_begun: int
    in_flight: set[int]
    """Names."""
    beyond_s: float
    """Work of those parked that are not looked at."""
    num_beyond: int


class LookaheadScheduler:
    """Keeps, from call to call, the lane of each prompt, the rounds that are left, and whose turn it was."""

    def __init__(self, work: Work | None = None) -> None:
        """Begin with nothing dealt.

        Args:
            work: what prefill costs; only proportions matter, so that of the whole model will do for its stages.
                Needed where there is more than one lane.
        """
        self._work = work
        self._single = ChunkedScheduler()
        self._rounds = Rounds(1)
        self._lane_of: dict[int, int] = {}
        """By name; of the prompts that are expected to be there at the next call."""
        self._num_beyond = 0
        self._last_lane = -1

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Choose the next step.

        Raises:
            ValueError: there are several lanes, and nothing to balance them by.
        """
        num_lanes = view.limits.num_lanes
        if num_lanes == 1:
            return self._single.schedule(view)
        if self._work is None:
            raise ValueError(f"lookahead over {num_lanes} lanes needs to know what prefill costs")
        if self._rounds.num_lanes != num_lanes:
            self._rounds, self._lane_of, self._last_lane = Rounds(num_lanes), {}, -1
        output = self._next(view, self._work)
        if view.num_in_flight or output.rows.size:
            return output
        return self._single.schedule(view)  # only memory can be in the way, so lanes do not matter

    def _next(self, view: SchedulerView, work: Work) -> SchedulerOutput:
        share = _decode_share(view)
        room = Room.beside(share, view.limits, work)
        plan = LanePlan(view, work)
        plan.decode(share)
        queue = _look(view, work, plan.room_blocks(), room)
        works, counts = self._deal(queue, room)
        lane = self._turn(queue)
        if lane is not None:
            own = [row for row, name in zip(queue.rows, queue.names, strict=True) if self._lane_of[name] == lane]
            plan.give(own, self._rounds.share_s(lane, works, counts, room))
            self._last_lane = lane
        plan.continue_prefills()
        if not plan.preempts:
            plan.admit(whole=False)
        for name in plan.ended:
            del self._lane_of[name]
        return plan.output()

    def _deal(self, queue: _Queue, room: Room) -> tuple[list[float], list[int]]:
        """Give each prompt a lane if anything has changed, and return the work and the prompts that each lane has."""
        num_lanes = self._rounds.num_lanes
        is_new = self._lane_of.keys() != set(queue.names) or self._num_beyond != queue.num_beyond
        if is_new:
            self._num_beyond = queue.num_beyond
            self._deal_new(queue)
            self._even_out(queue, room.work_s)
        works, counts = [queue.beyond_s / num_lanes] * num_lanes, [ceil_div(queue.num_beyond, num_lanes)] * num_lanes
        for name, work_s in zip(queue.names, queue.work_s, strict=True):
            works[self._lane_of[name]] += work_s
            counts[self._lane_of[name]] += 1
        if is_new:
            self._rounds.begin(works, counts, room)
        return works, counts

    def _deal_new(self, queue: _Queue) -> None:
        """Give a lane to those that have none."""
        kept = {name: self._lane_of[name] for name in queue.names if name in self._lane_of}
        given = [0.0] * self._rounds.num_lanes
        for name, work_s in zip(queue.names, queue.work_s, strict=True):
            if name in kept:
                given[kept[name]] += work_s
        new = [i for i, name in enumerate(queue.names) if name not in kept]
        lanes = deal([queue.work_s[i] for i in new], given)
        self._lane_of = kept | {queue.names[i]: lane for i, lane in zip(new, lanes, strict=True)}

    def _even_out(self, queue: _Queue, turn_s: float) -> None:
        """Let the last ones that have not begun go to a lane that would end earlier by more than a turn.

        Less than that is whose turn it is: who waits would go to and fro, and be overtaken.
        """
        loads = [0.0] * self._rounds.num_lanes
        for name, work_s in zip(queue.names, queue.work_s, strict=True):
            loads[self._lane_of[name]] += work_s
        for i in reversed(range(queue.num_begun, len(queue.names))):
            name, work_s = queue.names[i], queue.work_s[i]
            lane, emptiest = self._lane_of[name], loads.index(min(loads))
            if loads[lane] - loads[emptiest] > work_s + turn_s:
                loads[lane] -= work_s
                loads[emptiest] += work_s
                self._lane_of[name] = emptiest

    def _turn(self, queue: _Queue) -> int | None:
        """Return the next lane that has prompts and none of them in flight; None if there is none."""
        num_lanes = self._rounds.num_lanes
        busy = {self._lane_of[name] for name in queue.in_flight}
        ready = set(self._lane_of.values()) - busy
        following = ((self._last_lane + 1 + i) % num_lanes for i in range(num_lanes))
        return next((lane for lane in following if lane in ready), None)


class LanePlan(StepPlan):
    """A step of one lane: of the prompts it takes only the lane's, up to the work that is due."""

    def __init__(self, view: SchedulerView, work: Work) -> None:
        super().__init__(replace(view, preempted=_on_host(view), waiting=view.waiting[:0]))
        self._whole_view = view
        self._work = work
        self._own: frozenset[int] = frozenset()
        self._left_s = 0.0
        self.ended: list[int] = []
        """Names of the prompts that are computed to their end in this step."""

    def room_blocks(self) -> int:
        """Return the blocks that nobody has been promised."""
        return self._running.free_blocks - self._promised_blocks()

    def give(self, rows: list[int], share_s: float) -> None:
        """Let the step take these prompts, up to so much work."""
        view = self._whole_view
        self._own = frozenset(rows)
        self._left_s = share_s
        comes = view.columns.host_tokens > 0
        comes[rows] = True
        preempted = view.preempted[comes[view.preempted]]
        self._view = replace(view, preempted=preempted, waiting=view.waiting[comes[view.waiting]])

    def _cut(self, row: int, computed: int, left: int) -> int:
        if row not in self._own:
            return 0
        chunk = self._work.largest(computed, self._left_s)
        if not chunk and not self._chunk_rows:
            chunk = 1  # a share may be less than a token
        return min(chunk, left, self._tokens_left)

    def _choose(self, row: int, num_tokens: int, computed: int, held: int) -> None:
        super()._choose(row, num_tokens, computed, held)
        self._left_s -= self._work.chunk_s(computed, num_tokens)
        columns = self._view.columns
        if computed + num_tokens == columns.num_prompt[row] + columns.num_output[row]:
            self.ended.append(int(columns.order[row]))
        else:
            self._left_s = 0.0  # what it is cut to is all that is due


def _on_host(view: SchedulerView) -> I32:
    """Return the preempted rows whose KV is on the host: bringing it back computes nothing, so any turn may."""
    rows: I32 = view.preempted[view.columns.host_tokens[view.preempted] > 0]
    return rows


def _decode_share(view: SchedulerView) -> int:
    """Return how many decodes a lane has, rows in flight that will decode included."""
    columns = view.columns
    free = int(np.count_nonzero(num_known(columns, view.running) - columns.num_computed[view.running] == 1))
    landing = int(np.count_nonzero(num_known(columns, view.in_flight) - view.in_flight_ends <= 1))
    return ceil_div(free + landing, view.limits.num_lanes)


def _look(view: SchedulerView, work: Work, room_blocks: int, room: Room) -> _Queue:
    """Return the queue as it will be once all batches are back, as far as it is looked at.

    Args:
        view: the moment.
        work: of prefill.
        room_blocks: that nobody has been promised.
        room: of a microbatch.
    """
    columns, num_lanes = view.columns, view.limits.num_lanes
    landing = num_known(columns, view.in_flight) - view.in_flight_ends > 1
    running = num_known(columns, view.running) - columns.num_computed[view.running] > 1
    parked = _fitting(view, room_blocks)
    rows = np.concatenate([view.in_flight[landing], view.running[running], parked])
    done = np.concatenate([view.in_flight_ends[landing], columns.num_computed[view.running[running]]])
    begun = np.zeros(rows.size)
    begun[: done.size] = done
    left = num_known(columns, rows) - begun
    works = left * (work.beta_s + work.alpha_s * (begun + (left + 1) / 2))
    num_begun, ahead_s = done.size, LOOK_ROUNDS * num_lanes * room.work_s
    enough = num_begun + int(np.searchsorted(works[num_begun:].cumsum(), ahead_s)) + 1
    stop = min(max(enough, num_begun + MIN_LOOK_PER_LANE * num_lanes), rows.size)
    names = columns.order[rows[:stop]].tolist()
    return _Queue(
        rows=rows[:stop].tolist(),
        names=names,
        work_s=works[:stop].tolist(),
        num_begun=num_begun,
        in_flight=set(names[: int(np.count_nonzero(landing))]),
        beyond_s=float(works[stop:].sum()),
        num_beyond=int(rows.size - stop),
    )


def _fitting(view: SchedulerView, room_blocks: int) -> I32:
    """Return the parked rows without KV on the host whose tokens fit the memory together, and the first in any case."""
    parked = np.concatenate([view.preempted, view.waiting]) if view.preempted.size else view.waiting
    parked = parked[view.columns.host_tokens[parked] == 0]
    blocks = -(-(num_known(view.columns, parked) + 1) // view.block_size) + 1  # one for the headroom of each
    fitting: I32 = parked[: max(int(np.searchsorted(blocks.cumsum(), room_blocks, side="right")), 1)]
    return fitting
