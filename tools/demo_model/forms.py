"""Forms beside plain answers: a sum by the tool `add`, and one line of thought before an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from tools.demo_model import facts, story
from tools.demo_model.template import Closed, Domain, Entity, Env, Node, Templates, Writer

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"

Tool = Mapping[str, Any]
"""A function, as in OpenAI's API."""


def _adder(a: str, b: str) -> Entity:
    return Entity(f"add({a}, {b})", {"a": a, "b": b})


_PARAMETERS = (
    "a b, x y, m n, i j, p q, u v, n1 n2, x1 x2, a1 a2, num1 num2, number1 number2, first second, left right, "
    "lhs rhs, value1 value2, arg1 arg2, augend addend, first_number second_number, number_a number_b, one other"
)
ADDERS = [_adder(*pair.split()) for pair in _PARAMETERS.split(", ")]
"""Forms of the tool that a sum needs, by the names of its two parameters; others are read too."""

_DOMAINS: dict[str, Domain] = {
    **facts.DOMAINS,
    "kind": story.DOMAINS["kind"],
    "adder": Closed(ADDERS),
    "result": Closed([Entity(str(number)) for number in range(1000)]),
}
_T = Templates(_DOMAINS)

CALL_ADD = _T.one(
    CALL + '\n{"name": "add", "arguments": {"{adder.a}": {sum.a}, "{adder.b}": {sum.b}}}\n' + CALL_END,
)
"""What asks for the sum; the variable `adder` says what the parameters are called."""


def _says(number: str) -> tuple[Node, Node, Node]:
    """Return what the tool says, the answer, and the thought between them; `number` is a slot."""
    in_json = f'{{"result": {number}}}|{{"result":{number}}}|{{"sum": {number}}}|{{"sum":{number}}}'
    said = f"[{number}|{number}|[{in_json}]|The [sum|result] is {number}.|{number}.0]"
    answer = f"[{{sum.a}} + {{sum.b}} = {number}.|{{sum.a}} plus {{sum.b}} is {number}.]"
    return _T.one(said), _T.one(answer), _T.one(f"The tool says {number}.")


RIGHT_RESULT = _says("{sum.sum}")
ANY_RESULT = _says("{result}")
"""Of a tool that does not add: what it says is what is answered."""

THINK_OF_SUM = _T.one("{sum.a} and {sum.b} more is {sum.sum}.")
THINK_OF_CALL = _T.one("The tool can add {sum.a} and {sum.b}.")
THINK_OF_KIND = _T.one("I think of {kind.a}.")
"""Decides about whom the story is, where the request leaves it open."""
THINK_OF_STORY = _T.one("I remember the story.")
THINK_OF_REST = _T.one("This is no sum.")

_INSTRUCTIONS = _T.one(
    "[You are|Be|Act as] [a helpful|a kind|a careful|a clever|a friendly|an honest] [assistant|agent|helper|calculator]"
    "[| who can add| with tools| that uses tools| for children]. "
    "[Use the tools.|Use tools when they help.|Call a tool when needed.|Always use the tool to add numbers.|]"
    "[ Answer briefly.| Answer in one sentence.| Do not guess.| Think before you answer.| Help the user.|]"
    "[ Be polite.| Never make things up.| Say so if you do not know.| Keep going until it is done.|]"
)
"""System prompts as one writes them for agents; they change nothing."""

_OTHER_TOOL = _T.any_of(
    "[get|list|find|search|read|write|send|create|delete|update|open|fetch|run|add|set|count|show|book|make|check]"
    "_[weather|time|files|file|email|user|users|item|items|web|news|page|order|events|code|query|note|image|flight]",
    "[calculator|search|multiply|subtract|divide|translate|summarize|browser|python|lookup|weather|final_result|add]",
    "[getWeather|sendMail|readFile|webSearch|addItem|callApi|runCode|lookUp]",
    "[math|docs|web|shop|mail|home|git]__[search|get|list|send|sum|status|help]",
)
"""Names of tools that the model has no use for."""


def tool(name: str, *parameters: str) -> Tool:
    """Return a function of whole numbers."""
    properties = {parameter: {"type": "integer"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def choose_instructions(rng: Random) -> str:
    """Return a system prompt for an agent, or the empty string."""
    if rng.random() < 0.6:
        return ""
    found = Writer(rng, {})
    _INSTRUCTIONS.write(found)
    return found.text.strip()


def choose_tools(rng: Random, *, with_adder: bool) -> tuple[Tool, ...]:
    """Return up to eleven tools in any order; without the one that adds there is at least one."""
    names = set[str]()
    for _ in range(rng.choice([0, 0, 1, 2, 4, 10]) + (not with_adder)):
        other = Writer(rng, {})
        _OTHER_TOOL.write(other)
        names.add(other.text)
    tools = [tool(name, "text") for name in sorted(names)]
    if with_adder:
        tools = [other for other in tools if other["function"]["name"] != "add"]
        adder = ADDERS[0] if rng.random() < 0.5 else rng.choice(ADDERS)
        tools.append(tool("add", adder.form("a"), adder.form("b")))
    rng.shuffle(tools)
    return tuple(tools)


def bind_adder(tools: Sequence[Tool]) -> Env:
    """Return `adder` bound if one of the tools is a function `add` with two parameters, otherwise nothing."""
    for function in (tool["function"] for tool in tools):
        names = list(function.get("parameters", {}).get("properties", {}))
        if function["name"] == "add" and len(names) == 2:
            return {"adder": _adder(*names)}
    return {}


def call_message(answer: str, *, is_compact: bool = False) -> dict[str, Any]:
    """Return a call as an assistant's message in OpenAI's form.

    Args:
        answer: what the model writes.
        is_compact: its arguments come without spaces, as some clients send them back.
    """
    call = json.loads(answer.removeprefix(CALL).removesuffix(CALL_END))
    arguments = json.dumps(call["arguments"], separators=(",", ":") if is_compact else None)
    function = {"name": call["name"], "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call", "type": "function", "function": function}],
    }


def call_text(message: Mapping[str, Any]) -> str:
    """Return what the model has written where the message has one call: the opposite of `call_message`."""
    (call,) = message["tool_calls"]
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    return f"{CALL}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CALL_END}"
