"""The parser of event streams, against bytes cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_client.errors import ProtocolError
from sluice_client.sse import SseDecoder, SseEvent


def decode(raw: bytes, cuts: list[int] | None = None) -> list[SseEvent]:
    decoder, events, start = SseDecoder(), [], 0
    for cut in [*sorted(cuts or []), len(raw)]:
        events += list(decoder.feed(raw[start:cut]))
        start = cut
    return events + list(decoder.close())


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("data: a\n\ndata: b\n\n", ["a", "b"]),
        ("data:a\r\rdata:b\r\n\r\n", ["a", "b"]),
        ("data: one\r\ndata: two\r\n\r\n", ["one\ntwo"]),
        ("data: one\ndata:  two\ndata\n\n", ["one\n two\n"]),
        (": keep-alive\n\n: again\n\ndata: x\n\n", ["x"]),
        ("id: 7\nretry: 5\nunknown: y\ndata: x\n\n", ["x"]),
        ("\ufeffdata: x\n\n", ["x"]),
        ("data: \ufeffx\n\n", ["\ufeffx"]),
        ("event: ping\n\ndata: x\n\n", ["x"]),
        ("data: [DONE]", ["[DONE]"]),
        ("data: cut\n", ["cut"]),
        ("data: ünï 👩 \u2028 line\n\n", ["ünï 👩 \u2028 line"]),
        ("", []),
        ("\n\n\r\n\r", []),
    ],
)
def test_events_are_those_of_the_standard_whatever_the_chunks(raw: str, expected: list[str]) -> None:
    data = raw.encode()
    assert [event.data for event in decode(data)] == expected
    assert [event.data for event in decode(data, list(range(len(data))))] == expected


LINES = st.lists(
    st.sampled_from(["data: é中", "data:", "data: x:y", ":", "event: e", "id: 1", "", "", "noise"]), max_size=20
)


@given(lines=LINES, ending=st.sampled_from(["\n", "\r", "\r\n"]), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_borders_of_chunks_change_nothing(lines: list[str], ending: str, cuts: list[int]) -> None:
    raw = "".join(line + ending for line in lines).encode()
    expected = decode("".join(line + "\n" for line in lines).encode())
    assert decode(raw, [min(cut, len(raw)) for cut in cuts]) == expected


def test_event_and_id_are_kept_with_the_data() -> None:
    assert decode(b"event: error\nid: 3\ndata: x\n\ndata: y\n\n") == [
        SseEvent("x", "error", "3"),
        SseEvent("y", "message", "3"),
    ]


def test_sizes_are_limited_within_one_line_and_over_many() -> None:
    with pytest.raises(ProtocolError, match="longer than 100 bytes"):
        list(SseDecoder(100).feed(b"data: " + b"x" * 100))
    with pytest.raises(ProtocolError, match="larger than 100 bytes"):
        list(SseDecoder(100).feed(b"data: 12345\n" * 20))
    many_small = SseDecoder(100)
    assert len(list(many_small.feed(b"data: 12345\n\n" * 1000))) == 1000


def test_bytes_that_are_not_utf8_are_an_error_after_the_events_before_them() -> None:
    events = []
    with pytest.raises(ProtocolError, match="UTF-8"):  # noqa: PT012  the loop shows what came before the error
        for event in SseDecoder().feed(b"data: good\n\ndata: \xff\n\n"):
            events.append(event.data)
    assert events == ["good"]
