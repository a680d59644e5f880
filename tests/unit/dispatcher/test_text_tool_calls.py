"""Calls and text of an answer: the same however its tokens come, and those that a plain search of the whole finds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.dispatcher.answers.answer_text import AnswerText
from services.dispatcher.text.detokenizer import ByteLevelTable
from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.thinking import ThinkStage, ThinkTags
from services.dispatcher.text.tool_calls import CallPiece, ToolCallParser
from services.dispatcher.text.tool_forms import FORMS, MAX_HEAD_CHARS, find_model_calls
from shared.process.config import ToolParser
from shared.types import FinishReason
from tests.support.text_models import CHATML, write_model_folder
from tests.support.tool_templates import TAGS, TEMPLATES, tool_json

BYTES: Final = [bytes([value]) for value in range(256)]
TAG_IDS: Final = {tag: 256 + index for index, tag in enumerate(TAGS)}
EOS: Final = 256 + len(TAGS)
PLAIN: Final = ByteLevelTable([*BYTES, *(tag.encode() for tag in TAGS), b""])
SPECIAL: Final = ByteLevelTable([*BYTES, *(b"" for _ in TAGS), b""])

# ---- the oracle: regular expressions over the whole text ------------------------------------------------------------

WS: Final = "[ \t\r\n]*"
STRING: Final = r'"(?P<quoted>(?:[^"\\\x00-\x1f]|\\.)*)"'
ANY: Final = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
MEMBERS: Final = f'"name"{WS}:{WS}{STRING}{WS},{WS}"(?:arguments|parameters)"{WS}:{WS}(?={{)'
OBJECT: Final = f'{WS}{{{WS}(?:"(?:type|id)"{WS}:{WS}{ANY}{WS},{WS})?{MEMBERS}'
WORD: Final = rf"{WS}(?P<word>[A-Za-z0-9_.-]+){WS}(?:(?:\[CALL_ID\]{WS}[A-Za-z0-9_.-]+{WS})?\[ARGS\]{WS})?(?={{)"


@dataclass(frozen=True)
class Family:
    opening: str
    heads: Sequence[str]
    following: str | None
    closings: Sequence[str]
    is_bare: bool = False


FAMILIES: Final = {
    "hermes": Family("<tool_call>", (OBJECT,), None, ("</tool_call>",)),
    "llama3": Family(r"<\|python_tag\|>", (OBJECT,), f"{WS};?{OBJECT}", (), is_bare=True),
    "mistral": Family(r"\[TOOL_CALLS\]", (rf"{WS}\[{OBJECT}", WORD), f"{WS},{OBJECT}", ("]",)),
    "phi": Family(r"<\|tool_call\|>|functools", (rf"{WS}\[{OBJECT}",), f"{WS},{OBJECT}", ("]", "<|/tool_call|>")),
}


def end_of_object(text: str, at: int, depth: int = 0) -> int | None:
    """Return where the object ends, character by character."""
    in_string = is_escaped = False
    for index in range(at, len(text)):
        char = text[index]
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = True
        elif char == '"':
            in_string = not in_string
        elif not in_string and char in "{}[]":
            depth += 1 if char in "{[" else -1
            if depth == 0:
                return index + 1
    return None


def head_at(text: str, at: int, heads: Sequence[str]) -> tuple[str, int, bool] | None:
    """Return name, end, and whether the arguments are in an object."""
    for head in heads:
        match = re.compile(head, re.DOTALL).match(text, at)
        if match is None or match.end() - at > MAX_HEAD_CHARS:
            continue
        found = match.groupdict()
        if found.get("word"):
            return found["word"], match.end(), False
        try:
            name = json.loads(f'"{found["quoted"]}"')
            name.encode()
        except ValueError:
            continue
        if name:
            return name, match.end(), True
    return None


def behind_object(text: str, at: int) -> int:
    """Return where the object of a call ends whose arguments end there."""
    if match := re.compile(WS + "}").match(text, at):
        end: int | None = match.end()
    elif re.compile(f'{WS},{WS}"').match(text, at):
        end = end_of_object(text, at, 1)
    else:
        end = at
    return at if end is None or end - at > MAX_HEAD_CHARS else end


def behind_calls(text: str, at: int, closings: Sequence[str]) -> int:
    for closing in closings:
        if (match := re.compile(WS + re.escape(closing)).match(text, at)) and match.end() - at <= MAX_HEAD_CHARS:
            at = match.end()
    return at


def found_in(text: str, family: Family, *, is_parallel: bool = True) -> tuple[str, list[tuple[str, str]], int]:
    """Return what is said in a whole text, the calls, and how many of these are whole."""
    segments, calls, at = [""], list[tuple[str, str]](), 0
    head = head_at(text, 0, family.heads) if family.is_bare else None
    while True:
        if head is None:
            opening = re.compile(family.opening).search(text, at)
            if opening is None:
                segments[-1] += text[at:]
                break
            segments[-1] += text[at : opening.start()]
            head, at = head_at(text, opening.end(), family.heads), opening.end()
            if head is None:
                segments[-1] += opening[0]
                continue
        name, start, in_object = head
        end = end_of_object(text, start)
        calls.append((name, text[start:end]))
        segments.append("")
        if end is None or not is_parallel:
            return said_of(segments, calls), calls, len(calls) - (end is None)
        at = behind_object(text, end) if in_object else end
        head = head_at(text, at, (family.following,)) if family.following else None
        if head is None:
            at = behind_calls(text, at, family.closings)
    return said_of(segments, calls), calls, len(calls)


def said_of(segments: Sequence[str], calls: Sequence[object]) -> str:
    return "".join(part for part in segments if part.strip(" \t\r\n")) if calls else segments[0]


# ---- hostile answers ------------------------------------------------------------------------------------------------

CALLS: Final = {
    "hermes": ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "<tool_call>", "</tool_call>"],
    "llama3": ['{"name": "add", "parameters": {"a": 1}}', "<|python_tag|>", ";", "; "],
    "mistral": [
        *('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]', "[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        *("[TOOL_CALLS]a[CALL_ID]b[ARGS]{}", "add", "[ARGS]", "[CALL_ID]", "[TOOL_CALLS][", "[TOOL_CALLS]f{}"),
    ],
    "phi": [
        *('<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', "<|tool_call|>", "<|/tool_call|>"),
        *('functools[{"name": "add", "arguments": {"a": 1}}]', "functools", "functools["),
    ],
}
COMMON: Final = [
    *('{"name": "add", "arguments": {"a": "}]</tool_call>", "b": [{}]}}', '{"name": "x", "parameters": {"a": "\\"{"}}'),
    *('{"name": "é\\ud83e\\udd8a\\n", "arguments": {"a": "\\u00e9 🦊 \\\\"}}', '{"name": "', 'ad\\"d", "arguments": '),
    *('{"type": "function", "name": "f", "arguments": {}, "id": "a}"}', '{"name": "", "arguments": {}}'),
    *('{"id": "a\\"", "name": "f", "arguments": {}}', '{"type": "x", "id": "y", "name": "f", "arguments": {}}'),
    *('{"name": "f", "arguments": "{}"}', '{"name": "\\ud800", "arguments": {}}', '{"arguments": {}, "name": "f"}'),
    *("{", "}", "[", "]", ",", '"', "\\", " ", "\n", "a", "So: ", "é🦊", '"a": 1', ', "id": 7', "{}", "[{"),
]


def answers_of(name: str) -> st.SearchStrategy[str]:
    own = st.sampled_from(CALLS[name])
    return st.lists(own | st.sampled_from(COMMON) | own, max_size=7).map("".join)


SIZES: Final = st.lists(st.integers(1, 9), max_size=12)


def pieces_of(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def join(calls: list[tuple[str, str]], pieces: Sequence[CallPiece]) -> None:
    """Add what came to the calls so far, as a client does."""
    assert len({piece.index for piece in pieces}) == len(pieces)
    for piece in pieces:
        if piece.call_id:
            assert piece.call_id == f"id{piece.index}"
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        name, arguments = calls[piece.index]
        calls[piece.index] = name, arguments + piece.arguments


def parse(name: str, pieces: Sequence[str], *, is_parallel: bool = True) -> tuple[str, list[tuple[str, str]], int]:
    parser = ToolCallParser(FORMS[name], "id{}".format, is_parallel=is_parallel)
    said, calls = "", list[tuple[str, str]]()
    for piece in pieces:
        said += parser.push(piece)
        join(calls, parser.take())
    said += parser.flush()
    join(calls, parser.take())
    return said, calls, parser.num_completed


@pytest.mark.parametrize("name", FORMS)
@given(st.data(), SIZES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_calls_are_found_as_in_the_whole_text(
    name: str, data: st.DataObject, sizes: list[int], is_parallel: bool
) -> None:
    text = data.draw(answers_of(name))
    expected = found_in(text, FAMILIES[name], is_parallel=is_parallel)
    assert parse(name, pieces_of(text, sizes), is_parallel=is_parallel) == expected
    assert parse(name, list(text), is_parallel=is_parallel) == expected


@pytest.mark.parametrize("name", FORMS)
@given(st.data(), st.sampled_from([MAX_HEAD_CHARS - 30, MAX_HEAD_CHARS, MAX_HEAD_CHARS + 9]))
@settings(max_examples=60, deadline=None)
def test_what_is_longer_than_a_head_may_be_is_text_however_it_comes(name: str, data: st.DataObject, size: int) -> None:
    before, after = data.draw(answers_of(name)), data.draw(answers_of(name))
    filling = data.draw(st.sampled_from([" ", "\n", "x"])) * size
    text = before + filling + after
    expected = found_in(text, FAMILIES[name])
    assert parse(name, [text]) == parse(name, list(text)) == expected


@pytest.mark.parametrize(
    ("name", "text", "said", "calls", "num_whole"),
    [
        ("hermes", CALLS["hermes"][0], "", [("add", '{"a": 1}')], 1),
        ("hermes", "So:\n" + CALLS["hermes"][0] + "\n" + CALLS["hermes"][0] + "\nDone.", "So:\n\nDone.", 2, 2),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')], 0),
        ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', [], 0),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")], 1),
        ("hermes", "Write <tool_call> around it.", "Write <tool_call> around it.", [], 0),
        ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', [], 0),
        ("hermes", " \n", " \n", [], 0),
        ("llama3", ' {"name": "f", "parameters": {"a": 1.10}}', "", [("f", '{"a": 1.10}')], 1),
        ("llama3", CALLS["llama3"][0] + "; " + CALLS["llama3"][0], "", 2, 2),
        ("llama3", "So: " + CALLS["llama3"][0], "So: " + CALLS["llama3"][0], [], 0),
        ("llama3", "So: <|python_tag|>" + CALLS["llama3"][0], "So: ", 1, 1),
        ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", [], 0),
        ("llama3", '{"name": "Bo", "age": 3}', '{"name": "Bo", "age": 3}', [], 0),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "x"}, {"name": "g", "arguments": {}}] ok',
            " ok",
            2,
            2,
        ),
        ("mistral", "a[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}", "a", 2, 2),
        ("phi", "functools" + CALLS["phi"][0][13:].removesuffix("<|/tool_call|>"), "", 1, 1),
        ("phi", "import functools\n", "import functools\n", [], 0),
    ],
)
def test_some_answers_as_a_person_reads_them(
    name: str, text: str, said: str, calls: list[tuple[str, str]] | int, num_whole: int
) -> None:
    found = parse(name, list(text))
    assert found == parse(name, [text])
    assert (found[0], found[2]) == (said, num_whole)
    assert found[1] == calls or len(found[1]) == calls


# ---- behind tokens, stop strings and thinking -----------------------------------------------------------------------

THINK: Final = ThinkTags(None, None, ThinkStage.UNDECIDED, lambda _: b"")
STOPS: Final = st.lists(st.sampled_from(['": 1', "</tool", "zz", "add", "\n\n", "}"]), max_size=2)


def tokens_of(text: str) -> list[int]:
    """Return a token for each tag, and for every other byte."""
    parts = re.split("(" + "|".join(map(re.escape, TAGS)) + ")", text)
    return [token for part in parts for token in ([TAG_IDS[part]] if part in TAG_IDS else part.encode())]


def answer_of(
    name: str, *, special: bool, stops: Sequence[str] = (), is_parallel: bool = True, ledger: bool = False
) -> AnswerText:
    answer = AnswerText((SPECIAL if special else PLAIN).start(), stops, with_tokens=ledger)
    answer.split_thinking(THINK, ThinkStage.UNDECIDED)
    parser = ToolCallParser(FORMS[name], "id{}".format, is_parallel=is_parallel)
    answer.tell_calls(parser, {token_id: tag for tag, token_id in TAG_IDS.items()} if special else {})
    return answer


Shown = tuple[str, str, list[tuple[str, str]]]


def read(
    answer: AnswerText, tokens: Sequence[int], sizes: Sequence[int], finish: FinishReason
) -> tuple[Shown, dict[int, Shown]]:
    """Return thought, text and calls, and what they were after so many tokens."""
    thought = said = ""
    calls: list[tuple[str, str]] = []
    shown: dict[int, Shown] = {}
    at = 0
    for size in [*sizes, len(tokens)]:
        part, at = tokens[at : at + size], at + size
        is_last = at >= len(tokens)
        said += answer.push(part, finish if is_last else FinishReason.NONE)
        thought += answer.take_thoughts()
        join(calls, answer.take_calls())
        if is_last or answer.was_cut:
            break
        shown[answer.num_tokens] = thought, said, list(calls)
    return (thought, said, calls), shown


@pytest.mark.parametrize("name", FORMS)
@given(st.data(), STOPS, SIZES, SIZES)
@settings(max_examples=100, deadline=None)
def test_what_is_shown_after_so_many_tokens_depends_on_them_alone(
    name: str, data: st.DataObject, stops: list[str], sizes: list[int], others: list[int]
) -> None:
    """Thinking first, calls in it too; a stop string ends all of it, before the calls are looked for."""
    thinks, special, is_parallel = (data.draw(st.booleans()) for _ in range(3))
    text = data.draw(answers_of(name))
    text = f"<think>{data.draw(answers_of(name))}</think>\n{text}" if thinks else text
    tokens = [*tokens_of(text), EOS]
    one = answer_of(name, special=special, stops=stops, is_parallel=is_parallel)
    other = answer_of(name, special=special, stops=stops, is_parallel=is_parallel, ledger=True)
    first = read(one, tokens, sizes, FinishReason.STOP)
    second = read(other, tokens, others, FinishReason.STOP)
    assert first[0] == second[0]
    both = first[1].keys() & second[1].keys()
    assert [first[1][count] for count in both] == [second[1][count] for count in both]
    assert (one.num_tokens, one.was_cut, one.has_called) == (other.num_tokens, other.was_cut, other.has_called)
    plain = AnswerText(PLAIN.start(), stops)
    visible = plain.push(tokens, FinishReason.STOP)
    thought, said, calls = first[0]
    if thinks and "</think>" in visible:
        visible = visible.partition("</think>")[2].lstrip("\r\n")
    elif visible.startswith("<think>"):
        visible = ""
    assert (said, calls, int(one.has_called)) == (
        *found_in(visible, FAMILIES[name], is_parallel=is_parallel)[:2],
        int(found_in(visible, FAMILIES[name], is_parallel=is_parallel)[2] > 0),
    )
    assert thinks or not thought


@pytest.mark.parametrize("special", [False, True])
def test_an_answer_that_may_have_one_call_ends_with_it(special: bool) -> None:
    text = "a" + CALLS["hermes"][0] + CALLS["hermes"][0]
    tokens = tokens_of(text)
    num_billed = len(tokens_of(text[: text.index("1}") + 2]))
    for size in (1, 7, 200):
        answer = answer_of("hermes", special=special, is_parallel=False)
        found, _ = read(answer, tokens, [size] * 200, FinishReason.LENGTH)
        assert found == ("", "a", [("add", '{"a": 1}')])
        assert answer.was_cut
        assert answer.has_called
        assert answer.num_tokens == num_billed


@pytest.mark.parametrize(
    ("parser", "template", "name"),
    [
        ("auto", TEMPLATES["hermes"], "hermes"),
        ("auto", TEMPLATES["mistral"], "mistral"),
        ("auto", TEMPLATES["phi"], "phi"),
        ("auto", CHATML + "{# <|python_tag|> #}", "llama3"),
        ("auto", CHATML + "{# <tool_call> arguments <function=f> #}", None),
        ("auto", CHATML, None),
        ("auto", None, None),
        ("none", TEMPLATES["hermes"], None),
        ("llama3", TEMPLATES["hermes"], "llama3"),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_how_a_model_calls_is_seen_by_its_template_or_said(
    tmp_path: Path, parser: ToolParser, template: str | None, name: str | None, special: bool
) -> None:
    folder = write_model_folder(tmp_path, tool_json(**{"special" if special else "plain": TAGS}), template=template)
    calls = find_model_calls(parser, PromptCodec(read_model_folder(folder)))
    assert (calls and calls.form.name) == name
    if calls is not None:
        assert set(calls.special_tags.values()) == (
            {tag for tag in TAGS if tag in calls.form.tags} if special else set()
        )


def test_ids_of_calls_are_of_the_familys_form_and_their_own() -> None:
    for form in FORMS.values():
        ids = [form.call_id(answer, index) for answer in ("a 0", "a 1", "b 0") for index in range(3)]
        assert len(set(ids)) == len(ids)
        assert ids == [form.call_id(answer, index) for answer in ("a 0", "a 1", "b 0") for index in range(3)]
    assert re.fullmatch("[a-z0-9]{9}", FORMS["mistral"].call_id("a", 0))
    assert re.fullmatch("call_[a-z0-9]{24}", FORMS["hermes"].call_id("a", 0))
