"""Event ids and what they make of an answer that is asked for again: whatever the tokens, batches, stops and cuts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.dispatcher.answers.answer_text import AnswerText
from services.dispatcher.answers.event_ids import MAX_CHOICES, EventIds, Position, parse_last_event_id
from services.dispatcher.answers.resume import ResumableStreamer
from services.dispatcher.answers.shapes import ChoiceShape, Shape
from services.dispatcher.endpoints.call import Choice
from services.dispatcher.http.errors import ApiError
from services.dispatcher.session.request import FailureCode
from services.dispatcher.text.detokenizer import load_table
from shared.types import FinishReason
from tests.support.text_models import byte_level_json

TOKENIZER = Tokenizer.from_str(byte_level_json())
TABLE = load_table(TOKENIZER)
SHAPE = Shape(True, "chatcmpl-1", 0, "tiny", "default", include_usage=False)
STOPS = ["fox", "ox", "the", " t", "🦊", "。", "zz"]
PAIR = re.compile(r"\s*(_|\d{1,7}\S*),(_|\d{1,7}\S*)\s*")
Part = tuple[list[int], FinishReason]
Event = tuple[str, int, str]
"""(id, choice, text)"""


class Client:
    """What one connection brings."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, data: bytes, now_s: float) -> None:
        label, _, content = data.partition(b"\n")
        assert label.startswith(b"id: ")
        choice = json.loads(content.removeprefix(b"data: "))["choices"][0]
        self.events.append((label.removeprefix(b"id: ").decode(), choice["index"], choice["delta"].get("content", "")))


def make_choices(count: int, stops: Sequence[str], min_tokens: int) -> list[Choice]:
    return [Choice(index, AnswerText(TABLE.start(), stops, min_tokens=min_tokens), None) for index in range(count)]


def play(
    parts: Sequence[Sequence[Part]], order: Sequence[int], stops: Sequence[str], min_tokens: int, last_id: str = ""
) -> tuple[list[Event], list[Choice]]:
    """Give each choice its parts, in the order of choices, and return what the client got."""
    count = len(parts)
    headers = {"Last-Event-ID": last_id} if last_id else {}
    seen = parse_last_event_id(headers, count, can_resume=True)
    client, ids, choices = Client(), EventIds(seen), make_choices(count, stops, min_tokens)
    streamers = [
        ResumableStreamer(choice, ChoiceShape(SHAPE, choice.index), client, None, ids, position)
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
    return ["".join(text for _, at, text in events if at == index) for index in range(count)]


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
    rest, resumed = connection(first[cut - 1][0])
    assert [a + b for a, b in zip(texts_of(first[:cut], count), texts_of(rest, count), strict=True)] == whole
    assert [choice.objection for choice in resumed] == [None] * count
    assert [choice.text.num_tokens for choice in resumed] == [choice.text.num_tokens for choice in choices]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_another_answer_is_never_joined_to_the_old_one(data: st.DataObject) -> None:
    """The second answer differs within what the client has: nothing of it is sent."""
    text = data.draw(texts)
    tokens = TOKENIZER.encode(text, add_special_tokens=False).ids
    first, _ = play([[([token], FinishReason.NONE) for token in tokens]], [], [], 0)
    (last_id, _, _) = first[-1]
    num_seen = int(last_id.partition("-")[0])
    if not num_seen:
        return
    other = list(tokens)
    at = data.draw(st.integers(0, num_seen - 1))
    other[at] = (other[at] + data.draw(st.integers(1, 50))) % 300
    rest, (choice,) = play([[([token], FinishReason.NONE) for token in other]], [], [], 0, last_id)
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
