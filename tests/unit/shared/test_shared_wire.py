from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from shared.checksum import SEAL_BYTES, seal
from shared.messages.base import MAX_REASON_CHARS, PROTOCOL_VERSION
from shared.messages.event import Event
from shared.messages.report import ClusterView, WorkerReport
from shared.messages.request import MAX_INLINE_BYTES, Cancel, RequestMessage, Submit
from shared.transport.bus import MAX_PAYLOAD_BYTES
from shared.types import SamplingParams
from shared.wire import (
    MAX_DEPTH,
    MAX_MESSAGE_BYTES,
    WireError,
    WireSizeError,
    decode,
    decode_json,
    decode_union,
    decode_union_json,
    encode,
    encode_json,
    encode_json_rows,
    read_fields,
    read_index,
)
from tests.unit.golden.samples import FOLDER, MESSAGES, all_message_types, golden_files, read_hex

ADAPTER: TypeAdapter[RequestMessage] = TypeAdapter(RequestMessage)
UNION_KINDS = ("submit", "accepted", "refused", "cancel", "cancelled", "replay", "replay_unknown")
NAMES = sorted(MESSAGES)
JSON_NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def fields_of(name: str) -> dict[str, object]:
    fields: dict[str, object] = msgpack.unpackb(read_hex(name)[:-SEAL_BYTES])
    return fields


def body_of(fields: object) -> bytes:
    """Return the msgpack, without its checksum."""
    data: bytes = msgpack.packb(fields)
    return data


def pack(fields: object) -> bytes:
    return seal(body_of(fields))


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


# --- golden bytes ---------------------------------------------------------------------------------------------------


def test_every_message_type_has_a_sample_with_every_field_set() -> None:
    assert {name: type(message) for name, message in MESSAGES.items()} == all_message_types()
    for message in MESSAGES.values():
        assert set(type(message).model_fields) - message.model_fields_set <= {"version", "kind"}, type(message)
        for name, field in type(message).model_fields.items():
            if name not in {"version", "kind"}:
                assert getattr(message, name) != field.default, (
                    f"{type(message).__name__}.{name} shows its default only"
                )


def test_golden_files_are_exactly_those_of_the_samples() -> None:
    on_disk = {path.name for path in FOLDER.iterdir() if path.suffix in {".hex", ".json"}}
    assert on_disk == set(golden_files())


@pytest.mark.parametrize("file_name", sorted(golden_files()))
def test_messages_encode_to_their_golden_bytes(file_name: str) -> None:
    hint = "the wire changed: if that is meant, run `python -m tests.unit.golden` and consider PROTOCOL_VERSION"
    assert (FOLDER / file_name).read_text() == golden_files()[file_name], hint


@pytest.mark.parametrize("name", NAMES)
def test_golden_msgpack_decodes_to_the_message(name: str) -> None:
    message = MESSAGES[name]
    assert decode(read_hex(name), type(message)) == message


@pytest.mark.parametrize("name", JSON_NAMES)
def test_golden_json_decodes_to_the_message(name: str) -> None:
    message = MESSAGES[name]
    assert decode_json((FOLDER / f"{name}.json").read_bytes(), type(message)) == message


def test_a_union_decodes_each_kind_to_its_own_type() -> None:
    for name in UNION_KINDS:
        assert decode_union(read_hex(name), ADAPTER) == MESSAGES[name]
        if name in JSON_NAMES:
            assert decode_union_json((FOLDER / f"{name}.json").read_bytes(), ADAPTER) == MESSAGES[name]


# --- versions, kinds, unknown fields --------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1, -1, 2**63])
def test_another_major_version_is_refused_naming_both(version: int) -> None:
    data = pack(fields_of("cancel") | {"version": version})
    with pytest.raises(WireError) as caught:
        decode(data, Cancel)
    assert str(version) in caught.value.reason
    assert str(PROTOCOL_VERSION) in caught.value.reason
    with pytest.raises(WireError, match="speaks protocol"):
        decode_union(data, ADAPTER)


def test_the_version_is_judged_before_the_fields() -> None:
    data = pack({"version": PROTOCOL_VERSION + 1, "kind": "cancel", "now": "all is different"})
    with pytest.raises(WireError, match=f"speaks protocol {PROTOCOL_VERSION + 1}"):
        decode(data, Cancel)


@pytest.mark.parametrize("version", [None, "1", True, 1.0, [1]])
def test_a_version_that_is_no_number_is_refused(version: object) -> None:
    with pytest.raises(WireError, match="no version"):
        decode(pack(fields_of("cancel") | {"version": version}), Cancel)


@pytest.mark.parametrize("field", ["version", "kind", "request_id", "attempt"])
def test_a_missing_field_is_refused(field: str) -> None:
    fields = fields_of("cancel")
    del fields[field]
    for call in (lambda: decode(pack(fields), Cancel), lambda: decode_json(json.dumps(fields).encode(), Cancel)):
        with pytest.raises(WireError, match=field):
            call()


def test_another_kind_is_refused_naming_both() -> None:
    with pytest.raises(WireError, match="expected a message of kind 'cancel', got 'replay'"):
        decode(read_hex("replay"), Cancel)
    with pytest.raises(WireError, match="plan"):
        decode_union(read_hex("plan"), ADAPTER)
    with pytest.raises(WireError, match="no kind"):
        decode_union(pack({"version": PROTOCOL_VERSION, "kind": 7}), ADAPTER)


def test_unknown_fields_of_a_newer_minor_version_are_ignored_at_every_depth() -> None:
    fields = fields_of("submit")
    sampling = fields["sampling"]
    assert isinstance(sampling, dict)
    newer = fields | {"sampling": sampling | {"beam_width": 4}, "priority": [{"a": 1}]}
    assert decode(pack(newer), Submit) == MESSAGES["submit"]
    assert decode_union(pack(newer), ADAPTER) == MESSAGES["submit"]


# --- malformed input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_and_a_trailing_byte_is_refused(name: str) -> None:
    data, kind = read_hex(name), type(MESSAGES[name])
    for size in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:size], kind)
    with pytest.raises(WireError):
        decode(data + b"\xc0", kind)
    with pytest.raises(WireError):
        decode(seal(data[:-SEAL_BYTES] + b"\xc0"), kind)


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_is_refused(name: str) -> None:
    data, kind = read_hex(name), type(MESSAGES[name])
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError, match="checksum"):
            decode(bytes(flipped), kind)


@pytest.mark.parametrize("field", ["age_s", "remaining_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(field: str, value: float) -> None:
    with pytest.raises(WireError, match=field):
        decode(pack(fields_of("submit") | {field: value}), Submit)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", 2**32),
        ("stream", -1),
        ("stream", "seven"),
        ("attempt", 0),
        ("attempt", 1.5),
        ("prompt", 5),
        ("sampling", None),
        ("sampling", []),
        ("qoe", {"ttft_s": 0}),
        ("tier", "urgent"),
        ("tier", 3),
        ("request_id", ["r"]),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(WireError, match=field):
        decode(pack(fields_of("submit") | {field: value}), Submit)


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"\x93\x01\x02\x03", b"\xc1", b"\x81\x01\x02", b"\xa1\xff", b"\xcb\x7f"]
)
def test_what_is_no_map_with_text_keys_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data, Cancel)
    with pytest.raises(WireError):
        decode(seal(data), Cancel)


@pytest.mark.parametrize("extension", [b"\xd4\x05a", b"\xc7\x00\x05", b"\xd6\xff\x00\x00\x00\x01", b"\xc7\x03\xff123"])
def test_msgpack_extensions_are_refused(extension: bytes) -> None:
    fields = body_of(fields_of("cancel"))
    assert fields[0] == 0x84  # a map of four fields; one more follows
    with pytest.raises(WireError, match=r"extension|not msgpack"):
        decode(seal(b"\x85" + fields[1:] + body_of("x") + extension), Cancel)


@pytest.mark.parametrize("header", ["dd", "df", "db", "c6", "c9"])
def test_headers_that_promise_four_giga_elements_cost_no_memory(header: str) -> None:
    data = seal(b"\x81\xa1x" + bytes.fromhex(header) + b"\xff\xff\xff\xff" + bytes(100))

    def refuse() -> None:
        with pytest.raises(WireError):
            decode(data, Cancel)

    assert peak_bytes(refuse) < 100_000


def test_a_flood_of_empty_maps_is_stopped_early() -> None:
    """A million empty maps are 1 MB on the wire and would be 64 MB in memory."""
    rows = [b"\xdc\xff\xff" + b"\x80" * 65_535] * 15
    data = seal(b"\x81\xa1x" + b"\x9f" + b"".join(rows))

    def refuse() -> None:
        with pytest.raises(WireError, match="more than"):
            decode(data, Cancel)

    assert len(data) < MAX_PAYLOAD_BYTES
    assert peak_bytes(refuse) < 4 * 2**20


@pytest.mark.parametrize("text", [b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"])
def test_nesting_of_json_is_bounded(text: bytes) -> None:
    with pytest.raises(WireError, match="not JSON within the limits"):
        decode_json(text, Cancel)
    with pytest.raises(WireError, match="not JSON within the limits"):
        read_fields(text)


def test_nesting_is_bounded_also_in_fields_that_are_ignored() -> None:
    def nested(depth: int) -> object:
        return [nested(depth - 1)] if depth else []

    allowed, too_deep = nested(MAX_DEPTH - 2), nested(MAX_DEPTH - 1)  # the message's own map is one level
    assert decode(pack(fields_of("cancel") | {"x": allowed}), Cancel) == MESSAGES["cancel"]
    with pytest.raises(WireError, match="deeper"):
        decode(pack(fields_of("cancel") | {"x": too_deep}), Cancel)
    for depth in (500, 100_000):
        with pytest.raises(WireError):
            decode(seal(b"\x91" * depth + b"\xc0"), Cancel)
        with pytest.raises(WireError):
            decode_json(b"[" * depth + b"]" * depth, Cancel)


def test_reasons_repeat_nothing_of_what_people_wrote() -> None:
    secret = "my secret words"
    for fields in (
        fields_of("refused") | {"reason": secret},
        fields_of("refused") | {"detail": [secret]},
        fields_of("refused") | {"request_id": {"x": secret}},
    ):
        for decode_any, data in ((decode_union, pack(fields)), (decode_union_json, json.dumps(fields).encode())):
            with pytest.raises(WireError) as caught:
                decode_any(data, ADAPTER)
            assert secret not in str(caught.value)
            assert caught.value.__cause__ is None
            assert caught.value.__suppress_context__


# --- size -----------------------------------------------------------------------------------------------------------


def long_submit(num_bytes: int) -> Submit:
    return Submit.model_validate(
        fields_of("submit") | {"prompt": bytes(num_bytes // 2), "generated": bytes(num_bytes - num_bytes // 2)}
    )


def test_the_size_limit_is_that_of_the_broker_in_both_directions() -> None:
    overhead = len(encode(long_submit(2**19))) - 2**19
    largest = long_submit(MAX_PAYLOAD_BYTES - overhead)
    assert len(encode(largest)) == MAX_PAYLOAD_BYTES
    assert decode(encode(largest), Submit) == largest
    with pytest.raises(WireSizeError) as caught:
        encode(long_submit(MAX_PAYLOAD_BYTES - overhead + 1))
    assert (caught.value.size_bytes, caught.value.max_bytes) == (MAX_PAYLOAD_BYTES + 1, MAX_PAYLOAD_BYTES)
    for call in (decode, decode_json):
        with pytest.raises(WireSizeError):
            call(bytes(MAX_PAYLOAD_BYTES + 1), Submit)


def test_the_longest_prompt_that_is_not_uploaded_fits_one_message() -> None:
    fields = fields_of("submit") | {"prompt": bytes(MAX_INLINE_BYTES - 8), "generated": bytes(8)}
    message = Submit.model_validate(fields)
    assert decode(encode(message), Submit) == message


def test_json_refuses_what_it_cannot_carry() -> None:
    with pytest.raises(WireError, match="JSON cannot carry"):
        encode_json(MESSAGES["submit"])


def test_an_integer_over_64_bits_is_refused_by_msgpack_only() -> None:
    message = decode_json(
        (FOLDER / "cancel.json").read_bytes().replace(b'"attempt":2', b'"attempt":%d' % 2**70), Cancel
    )
    assert message.attempt == 2**70
    with pytest.raises(WireError, match="64 bits"):
        encode(message)


# --- properties -----------------------------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """Golden bytes with some edits: overwritten, removed, inserted or repeated stretches."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        stretch = draw(st.binary(max_size=9))
        match draw(st.sampled_from(("overwrite", "insert", "remove", "repeat"))):
            case "overwrite":
                data[at : at + len(stretch)] = stretch
            case "insert":
                data[at:at] = stretch
            case "remove":
                del data[at : at + draw(st.integers(1, 9))]
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 60))]
    return bytes(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def with_any_values(draw: st.DrawFn) -> bytes:
    """A message of which some fields have any value."""
    fields = fields_of(draw(st.sampled_from(NAMES)))
    for field in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
        fields[field] = draw(VALUES)
    return body_of(fields)


MSGPACK = [read_hex(name)[:-SEAL_BYTES] for name in NAMES]
JSON = [(FOLDER / f"{name}.json").read_bytes() for name in JSON_NAMES]


@pytest.mark.slow
@settings(max_examples=1200)
@given(mutated(MSGPACK) | mutated(JSON) | with_any_values() | st.binary(max_size=200))
def test_whatever_comes_gives_a_message_or_a_wire_error(data: bytes) -> None:
    """Any exception but WireError fails the test; what decodes must survive the way back. The checksum is right."""
    for call in (lambda kind: decode(seal(data), kind), lambda kind: decode_json(data, kind)):
        for message in MESSAGES.values():
            try:
                found = call(type(message))
                again = decode(encode(found), type(found))
            except WireError:
                continue
            assert type(found) is type(message)
            assert again == found
    for decode_any, given_bytes in ((decode_union, seal(data)), (decode_union_json, data)):
        with suppress(WireError):
            decode_any(given_bytes, ADAPTER)


FINITE = st.floats(0, 1e9)


@settings(max_examples=100)
@given(
    prompt=st.binary(min_size=4, max_size=64),
    seed=st.integers(-(2**63), 2**63 - 1),
    age_s=FINITE,
    stop_ids=st.lists(st.integers(0, 2**31), max_size=64),
    request_id=st.text(max_size=40),
)
def test_submissions_survive_the_way_there_and_back(
    prompt: bytes, seed: int, age_s: float, stop_ids: list[int], request_id: str
) -> None:
    sampling = SamplingParams(max_tokens=5, seed=seed, stop_token_ids=tuple(stop_ids))
    fields = fields_of("submit") | {"prompt": prompt, "age_s": age_s, "request_id": request_id, "sampling": sampling}
    message = Submit.model_validate(fields)
    assert decode(encode(message), Submit) == message


@settings(max_examples=60)
@given(host=st.text(max_size=40), steps=st.integers(0, 2**62), step_time_s=FINITE)
def test_reports_survive_json(host: str, steps: int, step_time_s: float) -> None:
    fields = {"host": host, "num_steps": steps, "step_time_s": step_time_s}
    message = WorkerReport.model_validate(fields_of("worker_report") | fields)
    assert decode_json(encode_json(message), WorkerReport) == message


# --- what grows with the cluster -------------------------------------------------------------------------------------


def test_the_reason_of_an_event_is_cut_with_a_remark_and_only_once() -> None:
    names = ", ".join(f"worker-{number}" for number in range(5000))
    event = Event(name="n", service="s", instance_id="i", reason=names)
    assert len(event.reason) <= MAX_REASON_CHARS
    kept, _, remark = event.reason.partition("… (")
    assert names.startswith(kept)
    assert remark == f"{len(names) - len(kept)} more characters)"
    assert decode_json(encode_json(event), Event) == event


def test_rows_take_the_place_of_a_list_and_their_sum_has_the_limit_of_a_message() -> None:
    view = MESSAGES["cluster_view"]
    assert isinstance(view, ClusterView)
    rows = [status.model_dump_json().encode() for status in view.workers]
    assert decode_json(encode_json_rows(view, "workers", rows), ClusterView) == view
    with pytest.raises(WireSizeError):
        encode_json_rows(view, "workers", [b" " * MAX_MESSAGE_BYTES])


@pytest.mark.parametrize(("payload", "number"), [(b"", 0), (b" 12\n", 12), (b"0", 0)])
def test_who_asks_from_a_number_on_gives_digits(payload: bytes, number: int) -> None:
    assert read_index(payload) == number


@pytest.mark.parametrize("payload", [b"x", b"-1", b"1.0", b"9" * 20, b"{}"])
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="digits"):
        read_index(payload)
