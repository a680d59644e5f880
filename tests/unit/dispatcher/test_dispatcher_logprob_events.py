"""Events with log-probabilities: short however many tokens come at once, and all there after any cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.dispatcher.answers.answer_text import MAX_LOGPROB_TOKENS, AnswerText
from services.dispatcher.answers.event_ids import EventIds, parse_last_event_id
from services.dispatcher.answers.logprobs import LogprobWriter
from services.dispatcher.answers.resume import ResumableStreamer
from services.dispatcher.answers.shapes import ChoiceShape, Shape
from services.dispatcher.endpoints.call import Choice
from services.dispatcher.session.session import Session
from services.dispatcher.text.detokenizer import load_table
from services.dispatcher.text.token_names import TokenNames
from shared.stream_extras import TokenLogprob
from shared.types import FinishReason
from tests.support.text_models import byte_level_json

TOKENIZER = Tokenizer.from_str(byte_level_json())
TABLE = load_table(TOKENIZER)
NAMES = TokenNames(TOKENIZER, TABLE)
SHAPE = Shape(False, "cmpl-1", 0, "tiny", "default", include_usage=False)
CONTROL = 100_000
"""An id without text."""
WORDS = {
    word: TOKENIZER.encode(word, add_special_tokens=False).ids for word in ("the ", "fox", " t", "🦊", "你好", "z")
}


@dataclass
class KnownSession:
    """A session that has everything; each number is taken once."""

    tokens: Sequence[int]
    taken: list[int] = field(default_factory=list)

    def take_logprob(self, index: int) -> TokenLogprob:
        assert index not in self.taken
        self.taken.append(index)
        return TokenLogprob(-float(index), ((self.tokens[index], -float(index)),))


@dataclass
class Client:
    """What one connection brings."""

    ids: list[str] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def write(self, data: bytes, now_s: float) -> None:
        label, _, content = data.partition(b"\n")
        event = json.loads(content.removeprefix(b"data: "))
        self.ids.append(label.removeprefix(b"id: ").decode())
        self.choices.append(event["choices"][0])
        self.num_tokens.append(event.get("sluice", {"n": 1})["n"])

    def numbers(self, first: int = 0, end: int | None = None) -> list[float]:
        """Return the log-probabilities in some events."""
        return [number for choice in self.choices[first:end] for number in choice["logprobs"]["token_logprobs"]]

    def text(self, first: int = 0, end: int | None = None) -> str:
        return "".join(choice["text"] for choice in self.choices[first:end])


def play(tokens: Sequence[int], sizes: Sequence[int], stops: Sequence[str], last_id: str = "") -> Client:
    """Give a reader the tokens in parts, the finish with the last of them, and return what its client got."""
    (seen,) = parse_last_event_id({"Last-Event-ID": last_id} if last_id else {}, 1, can_resume=True)
    choice = Choice(0, AnswerText(TABLE.start(), stops, with_tokens=True), None)
    choice.session = cast("Session", KnownSession(tokens))
    client = Client()
    writer = LogprobWriter(is_chat=False, num_top=1, names=NAMES)
    streamer = ResumableStreamer(choice, ChoiceShape(SHAPE, 0), client, writer, EventIds([seen]), seen)
    streamer.begin(0.0)
    left, wanted = list(tokens), list(sizes)
    goes_on = True
    while left and goes_on:
        size = wanted.pop(0) if wanted else len(left)
        part, left = left[:size], left[size:]
        goes_on = streamer.on_tokens(part, FinishReason.NONE if left else FinishReason.LENGTH, 0.0)
    assert choice.objection is None
    return client


words = st.sampled_from(list(WORDS.values()))
answers = st.lists(st.one_of(words, st.integers(1, 90).map(lambda size: [CONTROL] * size)), min_size=1, max_size=80)
parts = st.lists(st.sampled_from([1, 2, 31, 32, 33, 100]), max_size=20)
STOPS = st.lists(st.sampled_from(["x the", "你z", "🦊🦊", "fo fo", "zzz"]), max_size=2, unique=True)


@settings(max_examples=150, deadline=None)
@given(answers, parts, parts, STOPS, st.data())
def test_events_are_short_and_bring_what_single_tokens_bring_before_and_after_a_cut(
    answer: list[list[int]], sizes: list[int], sizes_again: list[int], stops: list[str], data: st.DataObject
) -> None:
    """A token at a time is the reference. Behind text that may become a stop string tokens wait, however many."""
    tokens = [token for word in answer for token in word]
    expected, whole = play(tokens, [1] * len(tokens), stops), play(tokens, sizes, stops)
    if not stops:
        assert max(len(choice["logprobs"]["tokens"]) for choice in whole.choices) <= MAX_LOGPROB_TOKENS
    assert (whole.text(), whole.numbers()) == (expected.text(), expected.numbers())
    if sum(expected.num_tokens) == len(tokens):  # else a stop string has ended it, with whatever came in that part
        assert sum(whole.num_tokens) == len(tokens)
        assert whole.ids[-1] == expected.ids[-1]
    if not whole.ids:
        assert stops
        return
    cut = data.draw(st.integers(1, len(whole.ids)))
    rest = play(tokens, sizes_again, stops, whole.ids[cut - 1])
    assert whole.text(0, cut) + rest.text() == whole.text()
    assert whole.numbers(0, cut) + rest.numbers() == whole.numbers()


def test_two_hundred_tokens_at_once_come_in_seven_events() -> None:
    """6 × 32 + 8; of tokens without text 31 wait for what follows, each part brings one more event of those before."""
    assert play([*WORDS["z"]] * 200, [200], []).num_tokens == [32] * 6 + [8]
    client = play([CONTROL] * 40 + WORDS["z"], [41], [])
    assert [len(choice["logprobs"]["tokens"]) for choice in client.choices] == [1] * 9 + [32]
