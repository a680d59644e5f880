"""Conversations whose prompts share prefixes, as a closed loop: chats, agents, and documents that are asked often.

A conversation begins with what others may begin with, too (its *opening*: a system prompt, a document). The prompt of a
turn is all that has been said: the opening, the texts and answers of the turns before, and its own text. It is sent
when the answer before it has ended and its reader, or its tool, has had time for it; so a slower cluster is asked
later. Conversations begin as a Poisson process.

Token ids are random, from one generator for each opening and each conversation: what two prompts share is an opening or
their conversation, and no more. Conversation i of a seed has the same turns at every rate, but for what news it is
about.

Pure: the answers come from whoever asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil
from typing import Final

import numpy as np

from sim.workload.arrivals import poisson
from sim.workload.clipped_log_normal import fit_log_normal
from sim.workload.lengths import Lengths, LogNormal, Quantiles, Uniform, find_lengths
from sim.workload.workload import F64, I32

FIRST_TOKEN_ID: Final = 256
"""Smallest id of a prompt; as modelled workers draw them."""
VOCAB_SIZE: Final = 32_000
"""Ids of prompts are smaller, as modelled workers' are."""


class _Stream(IntEnum):
    """Generators of one seed."""

    ARRIVALS = 0
    OPENINGS = 1
    CONVERSATIONS = 2


@dataclass(frozen=True, slots=True)
class SimTurn:
    """One request of a conversation, and its answer."""

    text: I32
    """[num_text] new token ids, at least one: what the prompt has beyond all that was said before."""
    num_output: int
    """Tokens of the answer, at least 1."""
    think_s: float
    """Seconds from the end of the answer before; 0 for the first turn."""


@dataclass(frozen=True, slots=True)
class SimConversation:
    """Turns, of which each begins with all before it."""

    index: int
    """Of its seed, in order of beginning."""
    begin_s: float
    """When its first turn is sent, seconds from the beginning of the run."""
    opening: I32
    """[num_opening] token ids that other conversations may begin with, too; may be empty."""
    opening_index: int
    """Which of the load's openings that is."""
    turns: tuple[SimTurn, ...]

    def prompt(self, answers: Sequence[Sequence[int]]) -> I32:
        """Return the prompt of the next turn, after so many answers.

        Args:
            answers: token ids of each answer so far, fewer than there are turns.
        """
        said = [self.opening, self.turns[0].text]
        for answer, turn in zip(answers, self.turns[1 : len(answers) + 1], strict=True):
            said += [np.array(answer, dtype=np.int32), turn.text]
        return np.concatenate(said)

    @property
    def num_tokens(self) -> int:
        """Tokens of the last prompt and its answer."""
        return self.opening.size + sum(turn.text.size + turn.num_output for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Times between an answer and the next turn: log-normal, cut at the largest."""

    mean_s: float
    """After the cut."""
    sigma: float
    """Deviation of the logarithm, before the cut."""
    max_s: float

    def sample(self, count: int, random: np.random.Generator) -> F64:
        """Return so many of them, [count] seconds."""
        mu, sigma = fit_log_normal(self.mean_s, self.max_s, sigma=self.sigma)
        pauses_s: F64 = np.minimum(np.exp(mu + sigma * random.standard_normal(count)), self.max_s)
        return pauses_s


@dataclass(frozen=True, slots=True)
class News:
    """Openings that many begin with for a while, and nobody before or after."""

    share: float
    """Of the conversations, those that begin with the newest."""
    every_s: float
    """Seconds from one to the next."""


@dataclass(frozen=True, slots=True)
class PrefixLoad:
    """A kind of conversations."""

    num_openings: int
    """How many openings there are; 0: every conversation begins with its own text."""
    opening: LogNormal | Quantiles | Uniform
    """Tokens of an opening."""
    zipf: float
    """Popularity of the opening of rank r is r^-zipf; 0: all alike."""
    mean_turns: float
    """Turns of a conversation, at least 1: geometric, this mean before the cut."""
    max_turns: int
    """No conversation has more."""
    lengths: Lengths
    """Tokens of the new text of each turn, and of its answer."""
    pauses: Pauses
    """Before each turn but the first."""
    max_tokens: int
    """Of a prompt and its answer together; a conversation ends before a turn that would not fit."""
    news: News | None = None
    """Beside the openings, or None."""

    def openings(self, duration_s: float, seed: int) -> list[I32]:
        """Return the openings, [num_opening] token ids each.

        The most popular first; an empty one if there are none; then those that come up within a time, in order.
        """
        found = [np.zeros(0, dtype=np.int32)] if not self.num_openings else []
        num_news = 0 if self.news is None else ceil(duration_s / self.news.every_s)
        for index in range(self.num_openings + num_news):
            random = np.random.default_rng((seed, _Stream.OPENINGS, index))
            found.append(_text(int(np.rint(self.opening.tokens(random.standard_normal(1)))[0]), random))
        return found

    def conversations(self, rate_per_s: float, duration_s: float, seed: int) -> list[SimConversation]:
        """Return the conversations that begin within a time, in order of beginning.

        Args:
            rate_per_s: conversations that begin per second.
            duration_s: seconds in which they begin.
            seed: of all that is drawn.
        """
        openings, num_lasting = self.openings(duration_s, seed), max(self.num_openings, 1)
        popularity = np.arange(1, num_lasting + 1) ** -self.zipf
        popularity /= popularity.sum()
        begins_s = poisson([(duration_s, rate_per_s)], np.random.default_rng((seed, _Stream.ARRIVALS)))
        found: list[SimConversation] = []
        for index, begin_s in enumerate(begins_s.tolist()):
            random = np.random.default_rng((seed, _Stream.CONVERSATIONS, index))
            chosen = int(random.choice(num_lasting, p=popularity))
            if self.news is not None and random.random() < self.news.share:
                chosen = num_lasting + int(begin_s / self.news.every_s)
            opening = openings[chosen]
            turns = self._turns(self.max_tokens - opening.size, random)
            found.append(SimConversation(index, begin_s, opening, chosen, turns))
        return found

    def _turns(self, num_left: int, random: np.random.Generator) -> tuple[SimTurn, ...]:
        """Return the turns of one conversation, as many as fit into so many tokens."""
        count = min(int(random.geometric(1 / self.mean_turns)), self.max_turns)
        num_text, num_output = self.lengths.sample(count, random)
        think_s = self.pauses.sample(count, random)
        think_s[0] = 0.0
        count = max(int((np.cumsum(num_text + num_output) <= num_left).sum()), 1)
        columns = zip(num_text[:count].tolist(), num_output.tolist(), think_s.tolist(), strict=False)
        return tuple(SimTurn(_text(text, random), output, pause_s) for text, output, pause_s in columns)


def _text(num_tokens: int, random: np.random.Generator) -> I32:
    return random.integers(FIRST_TOKEN_ID, VOCAB_SIZE, num_tokens, dtype=np.int32)


def _log_normal(mean: float, sigma: float, largest: float) -> LogNormal:
    return LogNormal(kind="log-normal", mean=mean, sigma=sigma, max=largest)


CHATS: Final = PrefixLoad(
    num_openings=1,
    opening=Uniform(kind="uniform", low=64, high=64),
    zipf=0.0,
    mean_turns=4.0,
    max_turns=16,
    lengths=find_lengths("sharegpt-bros"),
    pauses=Pauses(mean_s=10.0, sigma=1.0, max_s=60.0),
    max_tokens=16_384,
)
"""People who talk with a model, behind one short system prompt for all. Assumed: all but the lengths of texts."""
AGENTS: Final = PrefixLoad(
    num_openings=8,
    opening=_log_normal(5000, 0.4, 12_000),
    zipf=1.0,
    mean_turns=5.0,
    max_turns=16,
    lengths=Lengths(
        title="tasks, results of tools, and calls",
        source="assumed",
        input=_log_normal(300, 1.0, 4096),
        output=_log_normal(100, 0.8, 1024),
    ),
    pauses=Pauses(mean_s=2.0, sigma=1.0, max_s=20.0),
    max_tokens=32_768,
)
"""A few agents, each with a long system prompt of its own, whose turns are results of tools. Assumed: all."""
DOCUMENTS: Final = PrefixLoad(
    num_openings=400,
    opening=find_lengths("longbench").input,
    zipf=1.0,
    mean_turns=1.0,
    max_turns=1,
    lengths=Lengths(
        title="questions about a document",
        source="assumed",
        input=_log_normal(40, 0.6, 256),
        output=_log_normal(150, 0.7, 1024),
    ),
    pauses=Pauses(mean_s=1.0, sigma=1.0, max_s=2.0),
    max_tokens=36_864,
)
"""Documents of which each is asked many times, one question at a time. Assumed: all but the lengths of documents."""
NEWS: Final = replace(DOCUMENTS, news=News(share=0.6, every_s=15.0))
"""The same, and most ask about the newest document. Assumed: all but the lengths of documents."""
