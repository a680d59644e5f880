"""The parser of event streams, against bytes cut anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_client.errors import ProtocolError
from sluice_client.sse import SseDecoder, SseEvent

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "client" / "vectors" / "sdk.json").read_text())


def decode(raw: bytes, cuts: list[int] | None = None) -> list[SseEvent]:
    decoder, events, start = SseDecoder(), [], 0
    for cut in [*sorted(cuts or []), len(raw)]:
        events += list(decoder.feed(raw[start:cut]))
        start = cut
    return events + list(decoder.close())


@pytest.mark.parametrize("case", VECTORS["sse"], ids=lambda case: repr(case["raw"]))
def test_events_are_those_of_the_standard_whatever_the_chunks(case: dict[str, Any]) -> None:
    data, expected = case["raw"].encode(), [SseEvent(*event) for event in case["events"]]
    assert decode(data) == expected
    assert decode(data, list(range(len(data)))) == expected


LINES = st.lists(
    st.sampled_from(["data: é中", "data:", "data: x:y", ":", "event: e", "id: 1", "", "", "noise"]), max_size=20
)


@given(lines=LINES, ending=st.sampled_from(["\n", "\r", "\r\n"]), cuts=st.lists(st.integers(0, 200), max_size=20))
def test_borders_of_chunks_change_nothing(lines: list[str], ending: str, cuts: list[int]) -> None:
    raw = "".join(line + ending for line in lines).encode()
    expected = decode("".join(line + "\n" for line in lines).encode())
    assert decode(raw, [min(cut, len(raw)) for cut in cuts]) == expected


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
