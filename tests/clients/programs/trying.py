"""What every program here shares: where to ask and for what, and how an outcome is told. Needs pydantic alone.

    python -m tests.clients.programs.NAME BASE CLUSTER FLAKY

`BASE` is a base URL that ends in `/v1`; `CLUSTER` is where the dispatcher itself is asked; `FLAKY` is a base URL whose
first answer is a 429, `-` for none.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

BASE, CLUSTER, FLAKY = sys.argv[1:4] if len(sys.argv) > 3 else ("", "", "-")
MODEL: Final = "tiny"
KEY: Final = "sk-" + hashlib.sha256(b"clients").hexdigest()
"""LiteLLM's proxy takes no weak one; the cluster takes any."""
QUESTION: Final = "Tell me a story about a fox."
MESSAGES: Final[list[Any]] = [{"role": "user", "content": QUESTION}]
NUM_TOKENS: Final = 64
"""Of an answer; the model ends none of itself before."""
MANY_TOKENS: Final = 4000
HOT: Final = 9.0
"""A temperature that is refused."""
REFUSAL: Final = "'temperature' must be at most 2."
UNSERVED: Final = "not served"
LIMIT_S: Final = 0.3
"""Of a client, for an answer that takes many times as long."""
THINK: Final = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 8}
SPEAK: Final = {"chat_template_kwargs": {"enable_thinking": False}}
_WAIT_S: Final = 20.0
_MAX_CHARS: Final = 160
PREFIX: Final = "outcome "


class Order(BaseModel):
    """An order of tea."""

    model_config = ConfigDict(extra="forbid")
    size: Literal["small", "large"]
    count: int = Field(ge=0, le=9)


SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "size": {"type": "string", "enum": ["small", "large"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["size", "count"],
    "additionalProperties": False,
}
"""Every answer of a model is held to it, so that one that knows nothing meets it."""
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "order", "description": "Order tea.", "parameters": SCHEMA, "strict": True},
}
FORMAT: Final[dict[str, Any]] = {
    "type": "json_schema",
    "json_schema": {"name": "order", "schema": SCHEMA, "strict": True},
}

Ability = Callable[[], object]
Error = TypeVar("Error", bound=BaseException)


def tell(abilities: Mapping[str, Ability]) -> None:
    """Try each ability and print its outcome; coroutines are run."""
    for name, ability in abilities.items():
        try:
            result = ability()
            if inspect.iscoroutine(result):
                asyncio.run(result)
            outcome = "yes"
        except Exception as error:  # whatever a library raises is what is to be told
            outcome = f"no: {sentence_of(error)}"
        print(PREFIX + json.dumps([name, outcome]), flush=True)


def sentence_of(error: BaseException) -> str:
    """Return our own sentence where an exception has it, else its first line."""
    text = str(error)
    own = re.search(r"['\"]?message['\"]?: ['\"](.*?)['\"], ['\"]type", text)
    line = own[1] if own else next(iter(text.strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:_MAX_CHARS].rstrip(": ")


def check(holds: object, what: str) -> None:
    """Fail with a sentence unless something holds."""
    if not holds:
        raise AssertionError(what)


def check_order(value: object) -> None:
    """Fail unless a value, or its JSON, is an order."""
    Order.model_validate_json(value) if isinstance(value, str) else Order.model_validate(value)


def raised(kind: type[Error], ability: Ability) -> Error:
    """Return the exception that something must raise."""
    try:
        result = ability()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def ends_soon() -> dict[str, Any]:
    """Return what has a model that knows nothing close an object as soon as it may."""
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{CLUSTER}/tokenize", json.dumps({"prompt": "}"}).encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        (brace,) = json.load(answer)["tokens"]
    return {"logit_bias": {str(brace): 100}}


def num_cancelled() -> float:
    """Return how many requests the dispatcher has seen leave."""
    with urllib.request.urlopen(f"{CLUSTER}/metrics") as answer:
        text = answer.read().decode()
    counts = re.findall(r'^sluice:requests_total\{.*finish="cancelled".*\} (\S+)$', text, re.MULTILINE)
    return sum(map(float, counts))


def check_cancelled(before: float) -> None:
    """Fail unless one more request is counted as left, soon."""
    end_s = time.monotonic() + _WAIT_S
    while num_cancelled() <= before:
        check(time.monotonic() < end_s, "the dispatcher goes on with the answer")
        time.sleep(0.05)
