"""Readers of streamed chats, each in a thread of its own, and what they were told while something was disturbed."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.processes import wait_until
from tests.support.waiting import rounds

_WHO = ("a fox", "a hare", "the sea", "a king", "snow", "a mill", "an owl", "a boat")
PROMPTS = [f"Tell me a {kind} story about {who}." for kind in ("short", "long") for who in _WHO]
MAX_TOKENS = 900
"""So many that a disturbance comes long before the end."""
READ_LIMIT_S = 240.0


@dataclass
class Reader:
    """One streamed chat, sampled under a seed of its own; runs from the start.

    Attributes:
        text: what came so far.
        error: why it ended early; empty if it did not.
        longest_gap_s: between two events.
    """

    url: str
    prompt: str
    seed: int
    max_tokens: int = MAX_TOKENS
    text: str = ""
    finish: str = ""
    error: str = ""
    num_events: int = 0
    longest_gap_s: float = 0.0
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"reader {self.seed}")
        self.thread.start()

    def _run(self) -> None:
        try:
            self._read()
        except (OSError, ValueError) as error:
            self.error = repr(error)

    def _read(self) -> None:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "stream": True, "max_tokens": self.max_tokens, "ignore_eos": True, "temperature": 0.8}
        body |= {"messages": [{"role": "user", "content": self.prompt}], "seed": self.seed}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        last_s = time.monotonic()
        with urllib.request.urlopen(request, timeout=120) as answer:
            for line in answer:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last_s)
                    last_s = time.monotonic()
                    self._take(json.loads(line[6:]))

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]["message"]
            return
        self.num_events += 1
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.finish = choice["finish_reason"] or self.finish


def read_all(
    urls: Sequence[str], disturb: Callable[[], None] | None = None, *, count: int = 8, max_tokens: int = MAX_TOKENS
) -> list[Reader]:
    """Stream so many prompts at once, in turn from each URL; disturb while all stream; return when all have ended.

    Where one has ended before the last has begun, all are asked anew.

    Raises:
        AssertionError: an answer had ended before the disturbance each time.
    """
    for _ in rounds("all stream, and none has ended: ask for more tokens"):
        chosen = enumerate(PROMPTS[:count])
        readers = [Reader(urls[index % len(urls)], prompt, index, max_tokens) for index, prompt in chosen]
        try:
            if disturb is None:
                return readers
            wait_until(partial(_all_stream, readers), "all stream", 60)
            if not any(reader.finish for reader in readers):
                disturb()
                return readers
        finally:
            for reader in readers:
                reader.thread.join(READ_LIMIT_S)
    raise AssertionError("rounds have an end")


def _all_stream(readers: Sequence[Reader]) -> bool:
    return all(reader.num_events or reader.error for reader in readers)


def texts_of(readers: list[Reader]) -> list[str]:
    """Return the texts of answers that came whole.

    Raises:
        AssertionError: one did not.
    """
    assert [reader.error for reader in readers] == [""] * len(readers)
    assert {reader.finish for reader in readers} == {"length"}
    return [reader.text for reader in readers]
