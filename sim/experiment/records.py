"""What became of every request of a workload: when each of its tokens came, or why they did not. Pure.

The simulator and the live replay fill the same columns, so that one summary serves both. Tokens of all requests lie in
one array, since a run may have millions:

    token_s      | 1.2 1.3 1.4 | 0.9 | 2.0 2.1 |        instants, by request, in order
    token_begin    0             3     4         6      request i has token_s[token_begin[i] : token_begin[i + 1]]
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.api_keys import Tier
from shared.qoe import answer_qoe, displayed, text_of, token_value, unread_tokens
from sim.workload.workload import F64, I32, U8, Bool, Workload, best_effort_of

I64 = NDArray[np.int64]

AT_ONCE_S = 1e-9
"""Tokens that are less apart on average came at once."""
UNFINISHED = "unfinished"
"""Failure of a request that neither ended nor failed while the run lasted."""
_COLUMNS: Final = (
    "arrival_s",
    "num_prompt",
    "num_output",
    "num_thinking",
    "qoe_ttft_s",
    "qoe_speed",
    "tier",
    "num_preemptions",
)
"""Of one number per request."""


@dataclass(frozen=True)
class Records:
    """Requests in order of arrival. Instants are seconds on the clock of `arrival_s`."""

    arrival_s: F64
    """[n] ascending."""
    num_prompt: I32
    """[n] tokens."""
    num_output: I32
    """[n] tokens that were asked for, thinking included."""
    num_thinking: I32
    """[n] of them the first ones, which are thinking."""
    qoe_ttft_s: F64
    """[n] time to first token that the reader expects; NaN when no reader follows."""
    qoe_speed: F64
    """[n] tokens per second at which the reader reads; NaN when no reader follows."""
    tier: U8
    """[n] `Tier`; best effort is what nobody waits for."""
    num_preemptions: F64
    """[n] how often it was preempted; NaN where nobody said."""
    failure: tuple[str, ...]
    """[n] why there is no whole answer; empty for a complete one."""
    token_s: F64
    """[num_tokens] when each token came, by request; ascending within one."""
    token_begin: I64
    """[n + 1] where each request's tokens begin; the last entry is the number of all tokens."""

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    def select(self, wanted: Bool) -> Records:
        """Return these requests only, [n] bool."""
        columns = {name: getattr(self, name)[wanted] for name in _COLUMNS}
        return Records(
            **columns,
            failure=tuple(self.failure[i] for i in np.flatnonzero(wanted)),
            token_s=self.token_s[np.repeat(wanted, self.num_tokens)],
            token_begin=np.concatenate(([0], np.cumsum(self.num_tokens[wanted]))),
        )

    @cached_property
    def is_best_effort(self) -> Bool:
        """[n] whether nobody waits for it."""
        return best_effort_of(self.tier)

    @cached_property
    def real_time(self) -> Records:
        """The requests that somebody waits for."""
        return self.select(~self.is_best_effort) if self.is_best_effort.any() else self

    @cached_property
    def is_complete(self) -> Bool:
        """[n] whether the whole answer came."""
        return np.array([not failure for failure in self.failure], dtype=np.bool_)

    @cached_property
    def num_tokens(self) -> I64:
        """[n] output tokens that came."""
        return np.diff(self.token_begin)

    @cached_property
    def ttft_s(self) -> F64:
        """[n] arrival to first token; NaN without a token."""
        return self._token_at(self.token_begin[:-1]) - self.arrival_s

    @cached_property
    def last_token_s(self) -> F64:
        """[n] instant of the last token; NaN without a token."""
        return self._token_at(self.token_begin[1:] - 1)

    @cached_property
    def tpot_s(self) -> F64:
        """[n] (last - first) / (tokens - 1); NaN with fewer than two tokens."""
        first_s = self.ttft_s + self.arrival_s
        tpot = np.full(len(self), np.nan)
        np.divide(self.last_token_s - first_s, self.num_tokens - 1, out=tpot, where=self.num_tokens > 1)
        return tpot

    @cached_property
    def normalised_latency_s(self) -> F64:
        """[n] arrival to last token, per token; NaN without a whole answer.

        Source: Orca's normalised latency, as BROS, section 7.1, defines it.
        """
        latency = np.full(len(self), np.nan)
        whole = self.is_complete & (self.num_tokens > 0)
        np.divide(self.last_token_s - self.arrival_s, self.num_tokens, out=latency, where=whole)
        return latency

    @cached_property
    def shown_s(self) -> F64:
        """[n] arrival to the instant at which the last token is displayed; NaN without a reader or a whole answer."""
        shown = np.full(len(self), np.nan)
        for i in np.flatnonzero(self.is_complete & (self.num_text > 0) & ~np.isnan(self.qoe_speed)).tolist():
            text_s, ttft_s = self._text_of(i)
            shown[i], _ = displayed(text_s, ttft_s, float(self.qoe_speed[i]))
        return shown

    @cached_property
    def tds_tokens_per_s(self) -> F64:
        """[n] token delivery speed, (tokens - 1) / (last - first); NaN with fewer than two tokens, or all at once.

        Source: Andes (arXiv 2404.16283), sections 2.2 and 6.2, which names it and gives no formula.
        """
        tds = np.full(len(self), np.nan)
        np.divide(1.0, self.tpot_s, out=tds, where=self.tpot_s > AT_ONCE_S)
        return tds

    @cached_property
    def effective_tokens(self) -> F64:
        """[n] tokens by what they were worth to the reader when they came; without a reader every one counts.

        Source: TokenFlow (arXiv 2510.02758), effective throughput. Deviations: an unread token is one that the
        reading pacer has not displayed, and one that nobody reads counts, as do those of the thinking.
        """
        effective = self.num_tokens.astype(np.float64)
        for i in np.flatnonzero((self.num_text > 0) & ~np.isnan(self.qoe_speed)).tolist():
            text_s, ttft_s = self._text_of(i)
            unread = unread_tokens(text_s, ttft_s, float(self.qoe_speed[i]))
            effective[i] += token_value(unread, text_s.size).sum() - text_s.size
        return effective

    @cached_property
    def longest_gap_s(self) -> F64:
        """[n] longest time between two tokens that follow each other; NaN with fewer than two tokens."""
        longest = np.full(len(self), np.nan)
        rows = np.flatnonzero(self.num_tokens > 1)
        if rows.size:
            gaps = np.diff(self.token_s, append=-np.inf)
            gaps[self.token_begin[1:][self.num_tokens > 0] - 1] = -np.inf  # from one request to the next
            has_tokens = np.flatnonzero(self.num_tokens > 0)
            longest[has_tokens] = np.maximum.reduceat(gaps, self.token_begin[:-1][has_tokens])
            longest[self.num_tokens < 2] = np.nan
        return longest

    def longest_gap_over_s(self, at_s: float) -> float:
        """Return the longest time between two neighbouring tokens of an answer within which an instant lies, or 0."""
        if not self.token_s.size:
            return 0.0
        is_over = np.append((self.token_s[:-1] <= at_s) & (at_s < self.token_s[1:]), False)
        is_over[self.token_begin[1:][self.num_tokens > 0] - 1] = False  # from one request to the next
        gaps = np.diff(self.token_s, append=0.0)[is_over]
        return float(gaps.max()) if gaps.size else 0.0

    @cached_property
    def qoe(self) -> F64:
        """[n] QoE of each answer, in [0, 1]; 0 for one that is not complete, NaN where nobody reads, or all is thought.

        Source: Andes (arXiv 2404.16283), section 3.1, as in `sluice_client.qoe`, whose functions are the reference.
        Deviations: an answer that is not complete counts as 0, however much of it came.
        """
        qoe = np.zeros(len(self))
        for i in np.flatnonzero(self.is_complete & (self.num_tokens > 0)).tolist():
            qoe[i] = answer_qoe(
                self._delivered_s(i), float(self.qoe_ttft_s[i]), float(self.qoe_speed[i]), int(self.num_thinking[i])
            )
        qoe[np.isnan(self.qoe_speed)] = np.nan
        return qoe

    @cached_property
    def num_text(self) -> I64:
        """[n] output tokens that came behind the thinking."""
        num_text: I64 = np.maximum(self.num_tokens - self.num_thinking, 0)
        return num_text

    def _delivered_s(self, index: int) -> F64:
        """Return when the tokens of a request came, seconds after its arrival."""
        delivered_s: F64 = self.token_s[self.token_begin[index] : self.token_begin[index + 1]] - self.arrival_s[index]
        return delivered_s

    def _text_of(self, index: int) -> tuple[F64, float]:
        """Return when the text of a request came, and when its reader expects its first token; some has come."""
        ttft_s, speed = float(self.qoe_ttft_s[index]), float(self.qoe_speed[index])
        return text_of(self._delivered_s(index), ttft_s, speed, int(self.num_thinking[index]))

    def _token_at(self, index: I64) -> F64:
        """Return [n]: the instants of these tokens; NaN for requests without any."""
        has_tokens = self.num_tokens > 0
        found = np.full(len(self), np.nan)
        found[has_tokens] = self.token_s[index[has_tokens]]
        return found


class Recorder:
    """Collects tokens while a run lasts.

    Args:
        workload: whose requests, by their index, it hears of; others may be added.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._tokens = [array("d") for _ in range(len(workload))]
        self._failure = [UNFINISHED] * len(workload)
        self._num_preemptions = array("d", [np.nan]) * len(workload)
        self._added: list[tuple[float, int, int]] = []
        self.num_done = 0
        """Requests of the workload that ended, well or not."""

    def add(self, arrival_s: float, num_prompt: int, num_output: int) -> int:
        """Return the index of a best-effort request that comes beside the workload, at this instant."""
        self._added.append((arrival_s, num_prompt, num_output))
        self._tokens.append(array("d"))
        self._failure.append(UNFINISHED)
        self._num_preemptions.append(np.nan)
        return len(self._tokens) - 1

    def tokens(self, index: int, at_s: float, count: int = 1) -> None:
        """Note that the next `count` tokens of a request came at this instant."""
        tokens = self._tokens[index]
        if count == 1:
            tokens.append(at_s)
        else:
            tokens.extend([at_s] * count)

    def tokens_at(self, index: int, at_s: F64) -> None:
        """Note that the next tokens of a request came at these instants."""
        self._tokens[index].frombytes(at_s.tobytes())

    def end(self, index: int, failure: str = "", num_preemptions: float = np.nan) -> None:
        """Note that a request ended; without a failure, it is complete. NaN: nobody says how often it was preempted."""
        self._failure[index] = failure
        self._num_preemptions[index] = num_preemptions
        self.num_done += index < len(self._workload)

    def records(self, arrival_s: F64 | None = None) -> Records:
        """Return what is known now.

        Args:
            arrival_s: [len(workload)] when each request was really sent, if not when the workload says; NaN leaves one
                that was not sent out.
        """
        workload = self._workload
        added_s, added_prompt, added_output = np.array(self._added, dtype=np.float64).reshape(-1, 3).T
        nobody = np.full(len(self._added), np.nan)
        arrivals = np.concatenate((workload.arrival_s if arrival_s is None else arrival_s, added_s))
        order = np.argsort(arrivals, kind="stable")[: np.count_nonzero(~np.isnan(arrivals))]
        counts = [len(self._tokens[i]) for i in order]
        return Records(
            arrivals[order],
            np.concatenate((workload.num_prompt, added_prompt.astype(np.int32)))[order],
            np.concatenate((workload.num_output, added_output.astype(np.int32)))[order],
            np.append(workload.num_thinking, np.zeros(nobody.size, dtype=np.int32))[order],
            np.concatenate((workload.qoe_ttft_s, nobody))[order],
            np.concatenate((workload.qoe_speed, nobody))[order],
            np.append(workload.tier, np.full(nobody.size, Tier.FLEX, dtype=np.uint8))[order],
            np.array(self._num_preemptions)[order],
            tuple(self._failure[i] for i in order),
            np.concatenate([np.zeros(0), *(np.frombuffer(self._tokens[i]) for i in order if self._tokens[i])]),
            np.concatenate(([0], np.cumsum(counts, dtype=np.int64))),
        )
