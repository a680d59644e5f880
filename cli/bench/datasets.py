"""Reads data sets from files: conversations as ShareGPT has them, lines of prompts, and traces of lengths.

.csv           a trace: columns arrival_s, input_tokens, output_tokens (others are ignored)
.json          a list of {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}
.jsonl         the same objects, or {"prompt": …, "completion": …} or {"prompt": …, "max_tokens": n}, one per line
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.bench.workload import Planned
from shared.errors import StartupError
from sim.workload import trace as trace_file

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
    try:
        text = path.read_text(encoding="utf-8")
        objects = [json.loads(line) for line in text.splitlines() if line.strip()] if _is_lines(path) else _list(text)
    except (OSError, ValueError) as error:
        hint = "Name a .csv trace, a .json list of conversations or a .jsonl file of prompts"
        raise StartupError(f"the data set {path} cannot be read: {error}", hint) from error
    samples = [sample for item in objects if isinstance(item, dict) for sample in _samples(item)]
    if not samples:
        hint = 'Each entry is {"conversations": […]} or {"prompt": …}'
        raise StartupError(f"the data set {path} holds no prompt", hint)
    return samples


def _is_lines(path: Path) -> bool:
    return path.suffix in (".jsonl", ".ndjson")


def _list(text: str) -> list[Any]:
    found = json.loads(text)
    if not isinstance(found, list):
        raise ValueError("it is no JSON list")  # noqa: TRY004  one of the ways in which the file's content is wrong
    return found


def _samples(item: dict[str, Any]) -> Iterator[DatasetSample]:
    """Yield the entry's sample, if it has one."""
    prompt, answer, max_tokens = item.get("prompt"), item.get("completion"), item.get("max_tokens")
    turns = item.get("conversations")
    if isinstance(turns, list):
        prompt, answer = _first_exchange([turn for turn in turns if isinstance(turn, dict)])
    if not isinstance(prompt, str) or not prompt.strip():
        return
    limit = max_tokens if isinstance(max_tokens, int) and max_tokens > 0 else 0
    yield DatasetSample(prompt, answer if isinstance(answer, str) else "", limit)


def _first_exchange(turns: list[dict[str, Any]]) -> tuple[object, object]:
    """Return the first turn, if a person's, and the one after it."""
    if len(turns) < 2 or turns[0].get("from") not in _ASKS:
        return None, None
    return turns[0].get("value"), turns[1].get("value")
