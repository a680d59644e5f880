"""Event ids and what they make of an answer that is asked for again: whatever the tokens, batches, stops and cuts.

Events with log-probabilities are short however many tokens come at once, and all of them are there after any cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.dispatcher.answers.answer_text import MAX_LOGPROB_TOKENS, AnswerText
from services.dispatcher.answers.event_ids import MAX_CHOICES, EventIds, Position, parse_last_event_id
from services.dispatcher.answers.logprobs import LogprobWriter
from services.dispatcher.answers.resume import ResumableStreamer
from services.dispatcher.answers.shapes import AnswerShape, ChoiceShape
from services.dispatcher.endpoints.call import Choice
from services.dispatcher.http.errors import ApiError
from services.dispatcher.session.request import FailureCode
from services.dispatcher.session.session import Session
from services.dispatcher.text.detokenizer import load_table
from services.dispatcher.text.token_names import TokenNames
from shared.stream_extras import TokenLogprob
from shared.types import FinishReason
from tests.support.text_models import byte_level_json

TOKENIZER = Tokenizer.from_str(byte_level_json())
TABLE = load_table(TOKENIZER)
NAMES = TokenNames(TOKENIZER, TABLE)
CHAT = AnswerShape(True, "chatcmpl-1", 0, "tiny", "default", include_usage=False)
COMPLETION = AnswerShape(False, "cmpl-1", 0, "tiny", "default", include_usage=False)
STOPS = ["fox", "ox", "the", " t", "🦊", "。", "zz"]
PAIR = re.compile(r"\s*(_|\d{1,7}\S*),(_|\d{1,7}\S*)\s*")
CONTROL = 100_000
"""An id without text."""
WORDS = {
    word: TOKENIZER.encode(word, add_special_tokens=False).ids for word in ("the ", "fox", " t", "🦊", "你好", "z")
}
Part = tuple[list[int], FinishReason]


@dataclass(frozen=True)
class Event:
    """What a client sees of one."""

    id: str
    index: int
    text: str
    numbers: list[float]
    """Log-probabilities."""
    num_tokens: int


@dataclass
class Client:
    """What one connection brings."""

    events: list[Event] = field(default_factory=list)

    def write(self, data: bytes, now_s: float) -> None:
        label, _, content = data.partition(b"\n")
        assert label.startswith(b"id: ")
        event = json.loads(content.removeprefix(b"data: "))
        (choice,) = event["choices"]
        text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        numbers = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
        num_tokens = event.get("sluice", {"n": 1})["n"]
        self.events.append(Event(label.removeprefix(b"id: ").decode(), choice["index"], text, numbers, num_tokens))

    async def drain(self) -> None:
        raise AssertionError("nobody waits for it here")


@dataclass
class KnownSession:
    """A session that has everything; each number is taken once."""

    tokens: Sequence[int]
    taken: list[int] = field(default_factory=list)

    def take_logprob(self, index: int) -> TokenLogprob:
        assert index not in self.taken
        self.taken.append(index)
        return TokenLogprob(-float(index), ((self.tokens[index], -float(index)),))


def play(
    parts: Sequence[Sequence[Part]],
    order: Sequence[int] = (),
    stops: Sequence[str] = (),
    min_tokens: int = 0,
    last_id: str = "",
    *,
    with_logprobs: bool = False,
) -> tuple[list[Event], list[Choice]]:
    """Give each choice its parts, in the order of choices, and return what the client got."""
    count = len(parts)
    seen = parse_last_event_id({"Last-Event-ID": last_id} if last_id else {}, count, can_resume=True)
    client, ids, choices = Client(), EventIds(seen), []
    for index, own in enumerate(parts):
        text = AnswerText(TABLE.start(), stops, min_tokens=min_tokens, with_tokens=with_logprobs)
        session = cast("Session", KnownSession([token for tokens, _ in own for token in tokens]))
        choices.append(Choice(index, text, None, session=session))
    shape = COMPLETION if with_logprobs else CHAT
    writer = LogprobWriter(is_chat=False, num_top=1, names=NAMES) if with_logprobs else None
    streamers = [
        ResumableStreamer(choice, ChoiceShape(shape, choice.index), client, writer, ids, position)
        for choice, position in zip(choices, seen, strict=True)
    ]
    for streamer in streamers:
        streamer.begin(0.0)
    left = [list(each) for each in parts]
    for turn in [*order, *(index for index in range(count) for _ in parts[index])]:
        index = turn % count
        if left[index]:
            tokens, finish = left[index].pop(0)
            if not streamers[index].on_tokens(tokens, finish, 0.0):
                left[index].clear()
    return client.events, choices


def texts_of(events: Sequence[Event], count: int) -> list[str]:
    return ["".join(event.text for event in events if event.index == index) for index in range(count)]


@st.composite
def cut_into_parts(draw: st.DrawFn, tokens: list[int], finish: FinishReason, *, apart: bool) -> list[Part]:
    """The tokens in batches; the finish with the last of them, or apart."""
    borders = sorted(draw(st.sets(st.integers(1, max(1, len(tokens))), max_size=len(tokens))) | {len(tokens)})
    parts: list[Part] = []
    start = 0
    for border in borders:
        parts.append((tokens[start:border], FinishReason.NONE))
        start = border
    if apart:
        return [*parts, ([], finish)]
    return [*parts[:-1], (parts[-1][0], finish)]


words = st.sampled_from(["the ", "fox", "ox", " t", "he", "🦊", "你好", "。", "z", "Hello ", "é"])
texts = st.lists(words, min_size=1, max_size=8).map("".join)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_whatever_is_cut_where_the_rest_is_exactly_what_the_client_lacks(data: st.DataObject) -> None:
    """The answer is the same; how it is cut into batches, and which choice is first, is not."""
    count = data.draw(st.integers(1, 3))
    stops = data.draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True))
    min_tokens = data.draw(st.integers(0, 4))
    tokens = [TOKENIZER.encode(data.draw(texts), add_special_tokens=False).ids for _ in range(count)]
    finishes = [data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])) for _ in range(count)]
    apart = data.draw(st.booleans())
    turns = st.lists(st.integers(0, 2), max_size=12)

    def connection(last_id: str = "") -> tuple[list[Event], list[Choice]]:
        parts = [
            data.draw(cut_into_parts(each, finish, apart=apart)) for each, finish in zip(tokens, finishes, strict=True)
        ]
        return play(parts, data.draw(turns), stops, min_tokens, last_id)

    first, choices = connection()
    whole = texts_of(first, count)
    cut = data.draw(st.integers(1, len(first)))
    rest, resumed = connection(first[cut - 1].id)
    assert [a + b for a, b in zip(texts_of(first[:cut], count), texts_of(rest, count), strict=True)] == whole
    assert [choice.objection for choice in resumed] == [None] * count
    assert [choice.text.num_tokens for choice in resumed] == [choice.text.num_tokens for choice in choices]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_another_answer_is_never_joined_to_the_old_one(data: st.DataObject) -> None:
    """The second answer differs within what the client has: nothing of it is sent."""
    text = data.draw(texts)
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    first, _ = play([[([token], FinishReason.NONE) for token in tokens]])
    last_id = first[-1].id
    num_seen = int(last_id.partition("-")[0])
    if not num_seen:
        return
    other = list(tokens)
    at = data.draw(st.integers(0, num_seen - 1))
    other[at] = (other[at] + data.draw(st.integers(1, 50))) % 300
    rest, (choice,) = play([[([token], FinishReason.NONE) for token in other]], last_id=last_id)
    assert (rest, choice.objection) == ([], FailureCode.RESUME_MISMATCH)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.none() | st.builds(Position, st.integers(0, 10**6), st.none() | st.integers(0, 2**32 - 1), st.booleans()),
        min_size=1,
        max_size=MAX_CHOICES,
    )
)
def test_ids_read_as_they_were_written(seen: list[Position | None]) -> None:
    written = ",".join("_" if position is None else str(position) for position in seen)
    assert parse_last_event_id({"Last-Event-ID": written}, len(seen), can_resume=True) == seen
    label = EventIds(seen).label(0, Position(1, 2)).decode()
    assert parse_last_event_id({"Last-Event-ID": label[4:-1]}, len(seen), can_resume=True) == [
        Position(1, 2),
        *seen[1:],
    ]


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30).filter(lambda text: not PAIR.fullmatch(text)))
def test_whatever_else_stands_in_the_header_is_refused(header: str) -> None:
    with pytest.raises(ApiError, match="Last-Event-ID") as refused:
        parse_last_event_id({"Last-Event-ID": header}, 2, can_resume=True)
    assert (refused.value.status, refused.value.param) == (400, "Last-Event-ID")


def test_without_the_header_nothing_was_seen_and_without_a_stream_it_is_refused() -> None:
    assert parse_last_event_id({}, 3, can_resume=False) == [None] * 3
    with pytest.raises(ApiError):
        parse_last_event_id({"Last-Event-ID": "1"}, 1, can_resume=False)


def with_numbers(tokens: Sequence[int], sizes: Sequence[int], stops: Sequence[str], last_id: str = "") -> list[Event]:
    """Return the events of an answer whose tokens come in parts of these sizes, and in a last one."""
    borders = [0, *(at for at in accumulate(sizes) if at < len(tokens)), len(tokens)]
    parts = [(list(tokens[start:stop]), FinishReason.NONE) for start, stop in pairwise(borders)]
    parts[-1] = (parts[-1][0], FinishReason.LENGTH)
    events, (choice,) = play([parts], stops=stops, last_id=last_id, with_logprobs=True)
    assert choice.objection is None
    return events


def numbers_of(events: Sequence[Event]) -> list[float]:
    return [number for event in events for number in event.numbers]


answers = st.lists(
    st.one_of(st.sampled_from(list(WORDS.values())), st.integers(1, 90).map(lambda size: [CONTROL] * size)),
    min_size=1,
    max_size=80,
)
sizes = st.lists(st.sampled_from([1, 2, 31, 32, 33, 100]), max_size=20)
cutting_stops = st.lists(st.sampled_from(["x the", "你z", "🦊🦊", "fo fo", "zzz"]), max_size=2, unique=True)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(answers, sizes, sizes, cutting_stops, st.data())
def test_events_are_short_and_bring_what_single_tokens_bring_before_and_after_a_cut(
    answer: list[list[int]], first: list[int], again: list[int], stops: list[str], data: st.DataObject
) -> None:
    """A token at a time is the reference. Behind text that may become a stop string tokens wait, however many."""
    tokens = [token for word in answer for token in word]
    expected, whole = with_numbers(tokens, [1] * len(tokens), stops), with_numbers(tokens, first, stops)
    if not stops:
        assert max(len(event.numbers) for event in whole) <= MAX_LOGPROB_TOKENS
    assert (texts_of(whole, 1), numbers_of(whole)) == (texts_of(expected, 1), numbers_of(expected))
    if sum(event.num_tokens for event in expected) == len(tokens):  # else a stop string has ended it, with its part
        assert sum(event.num_tokens for event in whole) == len(tokens)
        assert whole[-1].id == expected[-1].id
    if not whole:
        assert stops
        return
    cut = data.draw(st.integers(1, len(whole)))
    rest = with_numbers(tokens, again, stops, whole[cut - 1].id)
    assert texts_of([*whole[:cut], *rest], 1) == texts_of(whole, 1)
    assert numbers_of([*whole[:cut], *rest]) == numbers_of(whole)


def test_two_hundred_tokens_at_once_come_in_seven_events() -> None:
    """6 × 32 + 8; of tokens without text 31 wait for what follows, each part brings one more event of those before."""
    events = with_numbers([*WORDS["z"]] * 200, [200], [])
    assert [event.num_tokens for event in events] == [32] * 6 + [8]
    events = with_numbers([CONTROL] * 40 + WORDS["z"], [41], [])
    assert [len(event.numbers) for event in events] == [1] * 9 + [32]
