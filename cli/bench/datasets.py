"""Reads data sets from files: conversations as ShareGPT has them, lines of prompts, and traces of lengths.

.csv           a trace: columns arrival_s, input_tokens, output_tokens (others are ignored)
.json          a list of {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}
.jsonl         the same objects, or {"prompt": …, "completion": …} or {"prompt": …, "max_tokens": n}, one per line
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cli.bench.prompts import TokenScale
from cli.bench.workload import Planned
from shared.reading import InputFile, parse_json
from sim.workload import trace as trace_file

DEFAULT_OUTPUT: Final = 128
"""Tokens of an answer whose length nothing states."""
MAX_DATASET_BYTES: Final = 2**30
"""Largest file; ShareGPT's has 640 MiB."""
MAX_DATASET_PARTS: Final = 2**24
_HINT: Final = "Name a .csv trace, a .json list of conversations or a .jsonl file of prompts"
_ASKS = ("human", "user")


@dataclass(frozen=True, slots=True)
class DatasetSample:
    """A prompt with what was answered to it."""

    prompt: str
    answer: str = ""
    max_tokens: int = 0
    """0: as long as the answer."""


def read_trace(path: Path) -> list[Planned]:
    """Return the requests of a trace, in order of arrival, the first one due at 0.

    Raises:
        StartupError: the file cannot be read or is no trace.
    """
    trace = trace_file.read_trace(path)
    columns = (trace.arrival_s.tolist(), trace.num_prompt.tolist(), trace.num_output.tolist())
    return [Planned(*request) for request in zip(*columns, strict=True)]


def read_samples(path: Path) -> list[DatasetSample]:
    """Return the first question of each conversation, with its answer.

    Raises:
        StartupError: the file cannot be read, or holds no prompt.
    """
    file = InputFile(path, MAX_DATASET_BYTES, "the data set", _HINT)
    objects = _lines(file) if path.suffix in (".jsonl", ".ndjson") else file.read_json(max_parts=MAX_DATASET_PARTS)
    if not isinstance(objects, list):
        raise file.error("holds no JSON list")
    samples = [sample for item in objects if isinstance(item, dict) for sample in _samples(item)]
    if not samples:
        raise file.error('holds no prompt, that is no {"conversations": […]} and no {"prompt": …}')
    return samples


def read_planned(path: Path, scale: TokenScale, num_output: int | None = None) -> list[Planned]:
    """Return every request of a data set, in its order: of a trace with its times, of texts all due at once.

    Args:
        path: of the file.
        scale: how the server counts words.
        num_output: tokens of every answer; None: as the data set says.

    Raises:
        StartupError: the file cannot be read, or holds no request.
    """
    if path.suffix == ".csv":
        return [with_output(request, num_output) for request in read_trace(path)]
    return [planned_sample(sample, scale, num_output) for sample in read_samples(path)]


def with_output(request: Planned, num_output: int | None) -> Planned:
    """Return the request of a trace with another answer; None leaves it as it is."""
    return request if num_output is None else Planned(request.arrival_s, request.num_input, num_output)


def planned_sample(sample: DatasetSample, scale: TokenScale, num_output: int | None) -> Planned:
    """Return the request of a sample; without a stated length the answer may be as long as the sample's."""
    num_input = round(len(sample.prompt.split()) * scale.tokens_per_word + scale.overhead)
    answer = round(len(sample.answer.split()) * scale.tokens_per_word)
    return Planned(0.0, num_input, num_output or sample.max_tokens or answer or DEFAULT_OUTPUT, sample.prompt)


def _lines(file: InputFile) -> list[Any]:
    found = []
    with closing(file.lines()) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found += [parse_json(line)] if line.strip() else []
            except ValueError as error:
                raise file.error(f"is wrong in line {number}: it is {error}") from None
    return found


def _samples(item: dict[str, Any]) -> Iterator[DatasetSample]:
    """Yield the entry's sample, if it has one."""
    prompt, answer, max_tokens = item.get("prompt"), item.get("completion"), item.get("max_tokens")
    turns = item.get("conversations")
    if isinstance(turns, list):
        prompt, answer = _first_exchange([turn for turn in turns if isinstance(turn, dict)])
    if not isinstance(prompt, str) or not prompt.strip():
        return
    limit = max_tokens if type(max_tokens) is int and 0 < max_tokens <= trace_file.MAX_TOKENS else 0
    yield DatasetSample(prompt, answer if isinstance(answer, str) else "", limit)


def _first_exchange(turns: list[dict[str, Any]]) -> tuple[object, object]:
    """Return the first turn, if a person's, and the one after it."""
    if len(turns) < 2 or turns[0].get("from") not in _ASKS:
        return None, None
    return turns[0].get("value"), turns[1].get("value")
