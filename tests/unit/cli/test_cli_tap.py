"""`sluice tap`: every message becomes one line of JSON, and people's tokens only when they are asked for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.tap.describe import describe
from shared.token_batch import MAGIC
from shared.types import FinishReason
from shared.wire import encode, encode_json
from tests.unit.golden.samples import BATCH, MESSAGES

SUBMIT = MESSAGES["submit"]


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_control_message_is_shown_with_all_of_its_fields(name: str) -> None:
    message = MESSAGES[name]
    shown = describe(encode(message), with_tokens=True)
    assert shown["format"] == "msgpack"
    json.dumps(shown)
    fields = message.model_dump(mode="python")
    assert set(shown["message"]) == set(fields)
    plain = {key: value for key, value in fields.items() if isinstance(value, str | int | float | None)}
    assert {key: shown["message"][key] for key in plain} == plain


def test_a_prompt_is_counted_and_shown_only_on_demand() -> None:
    data = encode(SUBMIT)
    assert describe(data)["message"]["prompt"] == {"num_tokens": 4}
    assert describe(data)["message"]["generated"] == {"num_tokens": 2}
    assert describe(data, with_tokens=True)["message"]["prompt"] == [1, 2, 70_000, 2**32 - 1]


def test_views_and_events_are_json_and_shown_as_they_are() -> None:
    event = MESSAGES["event"]
    assert describe(encode_json(event)) == {"format": "json", "message": event.model_dump(mode="json")}


def test_a_token_batch_is_shown_row_by_row() -> None:
    shown = describe(BATCH.pack(), with_tokens=True)
    assert shown["format"] == "token_batch"
    message = shown["message"]
    assert (message["worker_id"], message["counter"]) == ("w0-a1", 2**40 + 1)
    assert message["rows"][0] == {
        "stream": 7,
        "attempt": 1,
        "first_index": 0,
        "num_tokens": 1,
        "cached_tokens": 64,
        "num_logprobs": 0,
        "tokens": [11],
    }
    assert message["rows"][1]["finish"] == FinishReason.LENGTH.name.lower()
    assert [row.get("num_preemptions") for row in message["rows"]] == [None, None, 300]
    assert [row["tokens"] for row in message["rows"]] == [[11], [2**32 - 1, 33], []]
    assert all("tokens" not in row for row in describe(BATCH.pack())["message"]["rows"])


@given(st.binary(max_size=300) | st.binary(max_size=60).map(lambda rest: MAGIC + rest))
def test_whatever_passes_is_described_and_never_an_error(data: bytes) -> None:
    assert describe(data)["format"] in ("empty", "json", "msgpack", "token_batch", "text", "unknown")
    json.dumps(describe(data, with_tokens=True))


@pytest.mark.parametrize(
    ("data", "format_"),
    [
        (b"", "empty"),
        (b"41", "text"),
        (b"\xdd\xff\xff\xff\xff", "unknown"),
        (MAGIC + b"\x02\x02\x00\x00" + b"\xff" * 20, "unknown"),
        (b'{"a":', "text"),
        (b'{"version":99,"kind":"news"}', "json"),
    ],
)
def test_other_payloads_are_named(data: bytes, format_: str) -> None:
    assert describe(data)["format"] == format_


@pytest.mark.slow
def test_it_is_a_filter_of_one_message() -> None:
    """As `nats sub --translate 'sluice tap --decode'` runs it."""
    command = [sys.executable, "-m", "cli.main", "tap", "--decode"]
    done = subprocess.run(command, input=encode(SUBMIT), capture_output=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"")
    (line,) = done.stdout.decode().splitlines()
    shown = json.loads(line)
    assert shown["message"]["request_id"] == "r-0123"
    assert shown["message"]["prompt"] == {"num_tokens": 4}
