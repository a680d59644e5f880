"""A real engine over a pipeline that is only arithmetic: stages work first in, first out, for as long as costs say.

Time goes from event to event: a request comes, or the last stage is done with a batch. Between events the engine is
asked for batches until as many are in flight as it has lanes. Nothing else takes time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from services.worker.contract.batch import Batch, BatchOutput
from services.worker.engine.engine import Engine
from services.worker.modelled.executor import step_s
from services.worker.sequences.config import AddRefusal, NewSequence
from shared.cost import CostModel

TOKEN = 7
"""What is sampled, always."""


@dataclass
class ToyPipeline:
    """An engine, the stages' clocks, and when each of them was busy."""

    engine: Engine
    cost: CostModel
    """Of the whole model; each stage has an equal share."""
    num_stages: int
    now_s: float = 0.0
    batches: list[Batch] = field(default_factory=list)
    busy_s: list[list[tuple[float, float]]] = field(default_factory=list)
    """By stage: begin and end of each batch."""
    first_token_s: dict[int, float] = field(default_factory=dict)
    """By stream."""
    arrivals: deque[NewSequence] = field(default_factory=deque)
    """To come, in order of `arrival_s`."""
    _flights: deque[tuple[Batch, float]] = field(default_factory=deque)
    chunks_by_name: list[list[tuple[int, int]]] = field(default_factory=list)
    """Of each batch: sequences in order of their coming (0 is the first), and their tokens in it."""

    def __post_init__(self) -> None:
        self.busy_s = [[] for _ in range(self.num_stages)]

    def run(self, arrivals: Iterable[NewSequence], *, until_s: float = np.inf, max_steps: int = 100_000) -> None:
        """Run until all are done or the time has come."""
        self.arrivals = deque(arrivals)
        for _ in range(max_steps):
            self._take_arrivals()
            self._fill()
            times = [self._flights[0][1]] if self._flights else []
            times += [self.arrivals[0].arrival_s] if self.arrivals else []
            if not times or min(times) > until_s:
                assert times or not self.engine.table.num_sequences, "sequences are left, but no step runs"
                return
            self.now_s = min(times)
            self._land()
        raise AssertionError(f"not done after {max_steps} events")

    @property
    def next_s(self) -> float:
        """When the oldest batch in flight is done; infinite if there is none."""
        return self._flights[0][1] if self._flights else np.inf

    def idle_ratio(self, begin_s: float, end_s: float) -> float:
        """Return the share of all stages' time from begin to end in which they stood idle."""
        busy = sum(max(min(end, end_s) - max(begin, begin_s), 0.0) for stage in self.busy_s for begin, end in stage)
        return 1 - busy / (self.num_stages * (end_s - begin_s))

    def _take_arrivals(self) -> None:
        while self.arrivals and self.arrivals[0].arrival_s <= self.now_s:
            assert not isinstance(self.engine.registry.add(self.arrivals.popleft()), AddRefusal), (
                "no room for a sequence"
            )

    def _fill(self) -> None:
        while len(self._flights) < self.engine.config.num_lanes:
            batch = self.engine.next_batch(self.now_s)
            if batch is None:
                return
            self.batches.append(batch)
            names = self.engine.table.columns.order[batch.rows].tolist()
            self.chunks_by_name.append(list(zip(names, batch.num_tokens.tolist(), strict=True)))
            ready_s, stage_s = self.now_s, step_s(self.cost, batch) / self.num_stages
            for stage in self.busy_s:
                begin_s = max(ready_s, stage[-1][1] if stage else 0.0)
                ready_s = begin_s + stage_s
                stage.append((begin_s, ready_s))
            self._flights.append((batch, ready_s))

    def _land(self) -> None:
        while self._flights and self._flights[0][1] <= self.now_s:
            batch, _ = self._flights.popleft()
            tokens = np.where(batch.sample, np.int32(TOKEN), np.int32(-1))
            events = self.engine.absorb(batch, BatchOutput(batch.step_id, tokens, 0.0), self.now_s)
            for stream, first_index in zip(events.stream.tolist(), events.first_index.tolist(), strict=True):
                if first_index == 0:
                    self.first_token_s.setdefault(stream, self.now_s)
