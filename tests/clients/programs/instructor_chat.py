"""What people do with instructor, in its modes by tools and by JSON."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from instructor import Mode

from tests.clients.programs.trying import (
    BASE,
    FLAKY,
    HOT,
    KEY,
    LIMIT_S,
    MANY_TOKENS,
    MESSAGES,
    MODEL,
    NUM_TOKENS,
    REFUSAL,
    Order,
    check,
    check_cancelled,
    num_cancelled,
    raised,
    sentence_of,
    tell,
)


def client(mode: Any = Mode.TOOLS, base_url: str = BASE, **options: Any) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=base_url, api_key=KEY, **{"max_retries": 0, **options}), mode=mode
    ).chat.completions


def given(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [*MESSAGES], "temperature": 0, "max_tokens": NUM_TOKENS, **fields}


def said(**fields: Any) -> str:
    text: str = client().create(response_model=None, **given(**fields)).choices[0].message.content
    return text


def filled(mode: Any) -> None:
    order = client(mode).create(response_model=Order, max_retries=0, **given(max_tokens=100))
    check(isinstance(order, Order), "nothing is filled in")


def stream() -> None:
    chunks = client().create(response_model=None, stream=True, **given())
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    check(len(pieces) > 2, "it comes in one piece")
    check("".join(pieces) == said(), "another text")


def refusal() -> None:
    """Its own exception, around ours."""
    hot = given(temperature=HOT)
    error = raised(Exception, lambda: client(Mode.MD_JSON).create(response_model=Order, max_retries=0, **hot))
    check(REFUSAL in str(error), sentence_of(error))


def timeout() -> None:
    fields = given(max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    raised(openai.APITimeoutError, lambda: client(timeout=LIMIT_S).create(response_model=None, **fields))


def cancel() -> None:
    before = num_cancelled()
    fields = given(max_tokens=MANY_TOKENS, extra_body={"ignore_eos": True})
    chunks = client().create(response_model=None, stream=True, **fields)
    next(iter(chunks))
    chunks.close()
    check_cancelled(before)


def parts_of_an_object() -> None:
    *_, last = client(Mode.TOOLS_STRICT).create_partial(response_model=Order, max_retries=0, **given(max_tokens=100))
    check(Order.model_validate(last.model_dump()), "nothing is filled in")


if __name__ == "__main__":
    tell(
        {
            "chat": lambda: check(said(), "no text"),
            "stream": stream,
            "refusal": refusal,
            "retry": lambda: client(base_url=FLAKY, max_retries=1).create(response_model=None, **given()),
            "timeout": timeout,
            "cancel": cancel,
            "tools_named": lambda: filled(Mode.TOOLS),
            "tools_stream": parts_of_an_object,
            "json_schema": lambda: filled(Mode.JSON_SCHEMA),
            "parse": lambda: filled(Mode.TOOLS_STRICT),
        }
    )
