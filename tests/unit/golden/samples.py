"""One message of every kind, each field away from its default, as the golden files say it.

A message is read from its JSON file: whoever adds one, or a field, writes that file by hand. What JSON cannot carry is
made here. `python -m tests.unit.golden` writes all files anew; a change of them is a change of the protocol, and shows
in a diff.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import numpy as np

import shared.messages
from shared.api_keys import Tier
from shared.ids import DispatcherId, Incarnation, RequestId, StreamId, WorkerId
from shared.messages.base import ControlMessage
from shared.messages.errand import Errand
from shared.messages.report import WorkerStatus
from shared.messages.request import PrefixSource, Submit, pack_token_ids
from shared.stream_extras import StreamExtra, TokenLogprob, pack_extras
from shared.token_batch import TokenBatch
from shared.types import FinishReason, LatencyLimits, ReaderTarget, SamplingParams, Thinking
from shared.wire import WireError, encode, encode_json

FOLDER = Path(__file__).parent
_HEX_PER_LINE = 64


def all_message_types() -> dict[str, type[ControlMessage]]:
    """Return every type of message by the name of its golden files: its kind, if it says one."""
    for module in pkgutil.iter_modules(shared.messages.__path__):
        importlib.import_module(f"shared.messages.{module.name}")
    found: dict[str, type[ControlMessage]] = {"worker_status": WorkerStatus}
    open_types = [ControlMessage]
    while open_types:
        below = [kind for kind in open_types.pop().__subclasses__() if kind.__module__.startswith("shared.messages.")]
        for message_type in below:
            if message_type not in (Errand, WorkerStatus):  # an errand is what others are made of
                name = message_type.model_fields["kind"].default
                assert name not in found, f"two types of message are of kind '{name}'"
                found[name] = message_type
        open_types += below
    return found


def _sample(name: str) -> ControlMessage:
    fields = json.loads((FOLDER / f"{name}.json").read_text())
    del fields["version"]  # a sample is always of the present protocol
    return all_message_types()[name].model_validate(fields)


_SUBMIT = Submit(
    request_id=RequestId("r-0123"),
    stream=StreamId(4_000_000_000),
    attempt=2,
    dispatcher_id=DispatcherId("d0"),
    incarnation=Incarnation(77),
    prompt=pack_token_ids([1, 2, 70_000, 2**32 - 1]),
    generated=pack_token_ids([9, 8]),
    sampling=SamplingParams(
        max_tokens=200,
        temperature=0.5,
        top_p=0.875,
        top_k=40,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.125,
        logit_bias=((5, -100.0), (70_000, 2.5)),
        seed=-3,
        stop_token_ids=(2, 7),
        ignore_eos=True,
        min_tokens=12,
        logprobs=4,
        thinking=Thinking(opening_id=151_667, closing_id=151_668, is_open=True, budget=400),
        grammar=b'{"grammars":[{"json_schema":{"type":"object"}}]}',
    ),
    tier=Tier.FLEX,
    slo=LatencyLimits(ttft_s=0.5, tpot_s=0.125),
    qoe=ReaderTarget(ttft_s=1.5, speed_tokens_per_s=6.25, thinking_speed_tokens_per_s=12.5),
    displayed=(2.5, 0.75),
    thought_s=2.25,
    num_preemptions=3,
    token_age_s=0.125,
    age_s=0.25,
    remaining_s=30.0,
    fork_of=RequestId("r-0122"),
    cache_salt="tenant-7",
    reopens=True,
    needs_room=True,
    prefix=PrefixSource(worker_id=WorkerId("w9"), address="10.0.0.9:7070", num_tokens=4096),
    uploaded=(16, 8),
)

MESSAGES: dict[str, ControlMessage] = {
    "submit": _SUBMIT,
    **{path.stem: _sample(path.stem) for path in sorted(FOLDER.glob("*.json"))},
}

BATCH = TokenBatch(
    worker_id=WorkerId("w0-a1"),
    counter=2**40 + 1,
    stream=np.array([7, 4_000_000_000, 9], dtype=np.uint32),
    attempt=np.array([1, 2, 65_535], dtype=np.uint16),
    first_index=np.array([0, 300, 70_000], dtype=np.uint32),
    count=np.array([1, 2, 0], dtype=np.uint8),
    finish=np.array([FinishReason.NONE, FinishReason.LENGTH, FinishReason.CANCELLED], dtype=np.uint8),
    tokens=np.array([11, 2**32 - 1, 33], dtype=np.uint32),
    extras=pack_extras(
        [
            StreamExtra(0, cached_tokens=64),
            StreamExtra(1, logprobs=(TokenLogprob(-0.5, ((9, -0.25), (2**32 - 1, -0.5))), TokenLogprob(-np.inf))),
            StreamExtra(2, num_preemptions=300),
        ]
    ),
)


def golden_files() -> dict[str, str]:
    """Return what each golden file must hold."""
    files = {"token_batch.hex": _hex(BATCH.pack())}
    for name, message in MESSAGES.items():
        files[f"{name}.hex"] = _hex(encode(message))
        try:
            files[f"{name}.json"] = encode_json(message).decode() + "\n"
        except WireError:
            continue  # carries bytes: msgpack only
    return files


def read_hex(name: str) -> bytes:
    """Return the bytes of a golden file."""
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


def _hex(data: bytes) -> str:
    text = data.hex()
    return "".join(f"{text[i : i + _HEX_PER_LINE]}\n" for i in range(0, len(text), _HEX_PER_LINE))
