"""What a model thinks and what it says: the same parts however the tokens come, and those of a plain search."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.dispatcher.answers.answer_text import AnswerText
from services.dispatcher.text.detokenizer import ByteLevelTable
from services.dispatcher.text.model_folder import read_model_folder
from services.dispatcher.text.prompts import PromptCodec
from services.dispatcher.text.thinking import CLOSING, OPENING, ThinkSplitter, ThinkStage, ThinkTags, find_think_tags
from shared.process.config import ReasoningParser
from shared.types import FinishReason
from tests.support.text_models import (
    CHATML,
    OPENER,
    SILENT_OPENER,
    THINKER,
    byte_level_json,
    sentencepiece_json,
    thinking_json,
    write_model_folder,
)

OPEN: Final = 256
CLOSE: Final = 257
EOS: Final = 258
BYTES: Final = [bytes([value]) for value in range(256)]
WITH_TAGS: Final = ByteLevelTable([*BYTES, OPENING.encode(), CLOSING.encode(), b""])
SPECIAL_TAGS: Final = ByteLevelTable([*BYTES, b"", b"", b""])
STARTS: Final = (ThinkStage.UNDECIDED, ThinkStage.OPENED, ThinkStage.SPEAKING)
WORDS: Final = st.lists(
    st.sampled_from(
        [
            *(OPENING, CLOSING, "<", "</", "<thi", "nk>", "think>", "</thi", "\n", "\n\n", "\r\n", " ", "a", "🦊", "é"),
            *('"</think>"', "```\n<think>\n```", "print('<think>')", "x = 1"),
        ]
    ),
    max_size=9,
).map("".join)
BEGUN: Final = ["nk>zz", "a<think>zz", "</think>zz", "\n\nzz"]
"""Stop strings that begin and are never complete."""
STOPS: Final = st.lists(
    st.sampled_from(["a", "x =", "nk>", "</think>\n", "k>", "\n\n\n", "<", "🦊", "zz"]), max_size=2
) | st.just(BEGUN)
SIZES: Final = st.lists(st.integers(1, 9), max_size=12)
TOKENS: Final = st.lists(
    st.sampled_from(
        [[OPEN], [CLOSE], *([*text.encode()] for text in ("\n", " ", "a", "</think>", "<think>", "🦊", "<"))]
    ),
    max_size=9,
).map(lambda parts: [token for part in parts for token in part])


def tags_of(stage: ThinkStage, *, are_tokens: bool) -> ThinkTags:
    return ThinkTags(OPEN if are_tokens else None, CLOSE if are_tokens else None, stage, lambda _: b"")


def found_in(text: str, stage: ThinkStage, opening: str = OPENING, closing: str = CLOSING) -> tuple[str, str]:
    """Return both parts of a whole text, as a person would search for them."""
    if stage is ThinkStage.SPEAKING:
        return "", text
    before = f"[ \t\r\n]*{opening}"
    before = f"(?:{before})?" if stage is ThinkStage.OPENED else before
    match = re.match(f"{before}(?P<thought>.*?)(?:{closing}(?P<said>.*))?\\Z", text, re.DOTALL)
    if match is None:
        return "", text
    return match["thought"].strip("\r\n"), (match["said"] or "").lstrip("\r\n")


def rest_of(text: str, stage: ThinkStage) -> str:
    """Return what comes behind the closing tag, or all if there is no thinking."""
    begins = stage is ThinkStage.OPENED or (
        stage is ThinkStage.UNDECIDED and text.lstrip(" \t\r\n").startswith(OPENING)
    )
    return text.partition(CLOSING)[2] if begins else text


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """Return the tokens in parts of these sizes, and the rest."""
    borders = [0]
    for size in sizes:
        borders.append(min(borders[-1] + size, len(tokens)))
    return [tokens[start:end] for start, end in pairwise([*borders, len(tokens)])]


def read(
    answer: AnswerText, parts: Sequence[Sequence[int]], finish: FinishReason, *, apart: bool = False
) -> tuple[str, str, dict[int, tuple[str, str]]]:
    """Return both parts of an answer, and what they were after so many tokens; a stop string ends it."""
    thought = said = ""
    shown: dict[int, tuple[str, str]] = {}
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1 and not apart
        said += answer.push(part, finish if is_last else FinishReason.NONE)
        thought += answer.take_thoughts()
        if answer.was_cut:
            return thought, said, shown
        if not is_last:
            shown[answer.num_tokens] = thought, said
    if apart:
        said += answer.push([], finish)
        thought += answer.take_thoughts()
    return thought, said, shown


def answer_of(
    table: ByteLevelTable, stage: ThinkStage | None, stops: Sequence[str] = (), *, ledger: bool = False
) -> AnswerText:
    answer = AnswerText(table.start(), stops, with_tokens=ledger)
    if stage is not None:
        answer.split_thinking(tags_of(stage, are_tokens=table is not PLAIN), stage)
    return answer


PLAIN: Final = ByteLevelTable([*BYTES, b"", b"", b""])


@given(WORDS, st.sampled_from(STARTS), STOPS, SIZES, st.booleans(), st.booleans())
@example("<think>\n\nab\n</think>\n\ncd", ThinkStage.UNDECIDED, [], [1] * 12, False, False)
@example(" \n<think>ab\n</thi", ThinkStage.OPENED, [], [3, 9], True, False)
@example("<think>a</think>", ThinkStage.UNDECIDED, ["nk>"], [1] * 12, True, False)
@example("a<think>b", ThinkStage.UNDECIDED, BEGUN, [], False, False)
@settings(max_examples=400, deadline=None)
def test_tags_across_tokens_are_found_as_in_the_whole_text(
    text: str, stage: ThinkStage, stops: list[str], sizes: list[int], ledger: bool, apart: bool
) -> None:
    """One byte is one token. Stop strings end the whole text, tags included; it ends as if nothing were told apart."""
    tokens = [*text.encode()]
    whole = answer_of(PLAIN, None, stops)
    visible = read(whole, [tokens], FinishReason.LENGTH)[1]
    answer = answer_of(PLAIN, stage, stops, ledger=ledger)
    thought, said, _ = read(answer, cut(tokens, sizes), FinishReason.LENGTH, apart=apart)
    assert (thought, said) == found_in(visible, stage)
    assert (answer.num_tokens, answer.was_cut) == (whole.num_tokens, whole.was_cut)
    if not stops:
        assert answer.num_thinking_tokens == len(text[: len(text) - len(rest_of(text, stage))].encode())


def without_others(text: str, stage: ThinkStage, opening: str, closing: str) -> str:
    """Return the text without tags that are none and have no text: empty lines are next to the others then."""
    opens = stage is not ThinkStage.SPEAKING and text.lstrip().startswith(opening)
    begin = text.find(opening) if opens else -1
    end = text.find(closing, begin + 1) if opens or stage is ThinkStage.OPENED else -1
    return "".join(char for at, char in enumerate(text) if char not in (opening, closing) or at in (begin, end))


@given(TOKENS, st.sampled_from(STARTS), SIZES, st.booleans(), st.booleans())
@example([OPEN, OPEN, 10, OPEN], ThinkStage.UNDECIDED, [], True, False)
@example([10, OPEN, CLOSE, 32], ThinkStage.UNDECIDED, [], True, True)
@settings(max_examples=400, deadline=None)
def test_tags_that_are_tokens_are_found_by_their_ids_alone(
    tokens: list[int], stage: ThinkStage, sizes: list[int], special: bool, stops: bool
) -> None:
    """What spells a tag without being one is text, and so is a second one."""
    table = SPECIAL_TAGS if special else WITH_TAGS
    marks = {OPEN: "\ue001", CLOSE: "\ue002"}
    text = b"".join(marks[token].encode() if token in marks else bytes([token]) for token in tokens).decode()
    if special:
        text = without_others(text, stage, marks[OPEN], marks[CLOSE])
    parts = found_in(text, stage, marks[OPEN], marks[CLOSE])
    own = ("", "") if special else (OPENING, CLOSING)
    expected = tuple(part.replace(marks[OPEN], own[0]).replace(marks[CLOSE], own[1]) for part in parts)
    answer = answer_of(table, stage, BEGUN if stops else [])
    thought, said, _ = read(answer, cut([*tokens, EOS], sizes), FinishReason.STOP)
    assert (thought, said) == expected
    assert answer.num_tokens == len(tokens) + 1


@given(TOKENS, st.sampled_from(STARTS), STOPS, SIZES, SIZES, st.sampled_from([WITH_TAGS, SPECIAL_TAGS, PLAIN]))
@settings(max_examples=400, deadline=None)
def test_what_is_shown_after_so_many_tokens_depends_on_them_alone(
    tokens: list[int], stage: ThinkStage, stops: list[str], sizes: list[int], others: list[int], table: ByteLevelTable
) -> None:
    one, other = answer_of(table, stage, stops), answer_of(table, stage, stops)
    first = read(one, cut(tokens, sizes), FinishReason.LENGTH)
    second = read(other, cut(tokens, others), FinishReason.LENGTH)
    assert first[:2] == second[:2]
    both = first[2].keys() & second[2].keys()
    assert [first[2][count] for count in both] == [second[2][count] for count in both]
    assert one.num_thinking_tokens == other.num_thinking_tokens


@pytest.mark.parametrize(
    ("tokens", "stage", "count"),
    [
        ([OPEN, 97, 97, CLOSE, 98], ThinkStage.UNDECIDED, 4),
        ([10, OPEN, CLOSE, 98, OPEN, 97], ThinkStage.UNDECIDED, 3),
        ([97, CLOSE], ThinkStage.OPENED, 2),
        ([OPEN, 97, 97], ThinkStage.UNDECIDED, 3),
        ([97, OPEN, CLOSE], ThinkStage.UNDECIDED, 0),
        ([97, CLOSE], ThinkStage.SPEAKING, 0),
        ([10, 32], ThinkStage.UNDECIDED, 0),
        ([CLOSE, 10, 97], ThinkStage.OPENED, 1),
        ([10, 32], ThinkStage.OPENED, 2),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_the_tokens_of_the_thinking_are_counted_with_its_tags(
    tokens: list[int], stage: ThinkStage, count: int, special: bool
) -> None:
    for size in (1, 2, 9):
        answer = answer_of(SPECIAL_TAGS if special else WITH_TAGS, stage)
        read(answer, cut(tokens, [size] * 5), FinishReason.LENGTH)
        assert (answer.num_thinking_tokens, answer.num_tokens) == (count, len(tokens))


def codec_of(folder: Path, template: str | None, tokenizer_json: str | None = None) -> PromptCodec:
    return PromptCodec(read_model_folder(write_model_folder(folder, tokenizer_json, template=template)))


@pytest.mark.parametrize(
    ("parser", "template", "stage"),
    [
        ("auto", CHATML, None),
        ("auto", None, None),
        ("none", THINKER, None),
        ("auto", THINKER, ThinkStage.UNDECIDED),
        ("qwen3", CHATML, ThinkStage.UNDECIDED),
        ("deepseek_r1", CHATML, ThinkStage.OPENED),
    ],
)
def test_how_a_model_thinks_is_seen_by_its_template_or_said(
    tmp_path: Path, parser: ReasoningParser, template: str | None, stage: ThinkStage | None
) -> None:
    tags = find_think_tags(parser, codec_of(tmp_path, template))
    assert (tags and tags.at_start) == stage
    assert tags is None or (tags.opening_id, tags.closing_id) == (None, None)


@pytest.mark.parametrize("kind", ["text", "tokens", "special", "sentencepiece"])
@pytest.mark.parametrize(
    ("template", "kwargs", "stage"),
    [
        (THINKER, {}, ThinkStage.UNDECIDED),
        (THINKER, {"enable_thinking": True}, ThinkStage.UNDECIDED),
        (THINKER, {"enable_thinking": False}, ThinkStage.SPEAKING),
        (OPENER, {"thinking": True}, ThinkStage.OPENED),
        (OPENER, {}, ThinkStage.SPEAKING),
        (SILENT_OPENER, {"thinking": True}, ThinkStage.OPENED),
        (SILENT_OPENER, {}, ThinkStage.UNDECIDED),
    ],
)
def test_the_end_of_the_prompt_says_where_the_answer_begins(
    tmp_path: Path, kind: str, template: str, kwargs: dict[str, bool], stage: ThinkStage
) -> None:
    jsons = {
        "text": byte_level_json(),
        "tokens": thinking_json(),
        "special": thinking_json(special=True),
        "sentencepiece": sentencepiece_json(),
    }
    codec = codec_of(tmp_path, template, jsons[kind])
    tags = find_think_tags("auto", codec)
    assert tags is not None
    assert (tags.opening_id is not None) == (kind in ("tokens", "special"))
    for content in ("hi", "</think>", "<think>", "<think>\n\n</think>\n\n"):
        assert tags.stage_after(codec.encode_chat([{"role": "user", "content": content}], kwargs=kwargs)) is stage


@pytest.mark.parametrize(
    ("template", "stage"),
    [
        (THINKER, ThinkStage.UNDECIDED),
        (OPENER, ThinkStage.SPEAKING),
        (SILENT_OPENER, ThinkStage.SPEAKING),
        (SILENT_OPENER.replace("['content']", "['content'][0]['text']"), ThinkStage.SPEAKING),
        (CHATML + "{# </think> #}", ThinkStage.UNDECIDED),
    ],
)
def test_a_form_comes_at_once_where_the_template_did_not_open_the_thinking_that_it_could(
    tmp_path: Path, template: str, stage: ThinkStage
) -> None:
    tags = find_think_tags("auto", codec_of(tmp_path, template, thinking_json()))
    assert tags is not None
    assert tags.stage_of_form(ThinkStage.UNDECIDED) is stage
    others = set(ThinkStage) - {ThinkStage.UNDECIDED}
    assert {tags.stage_of_form(other) for other in others} == others


def test_a_user_who_ends_the_prompt_with_a_tag_opens_nothing(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, "{{ messages[0].content }}{# </think> <think> #}", thinking_json())
    tags = find_think_tags("auto", codec)
    assert tags is not None
    assert tags.stage_after(codec.encode_chat([{"role": "user", "content": "hi <think>"}])) is ThinkStage.UNDECIDED


@pytest.mark.parametrize("stage", [ThinkStage.UNDECIDED, ThinkStage.OPENED, ThinkStage.THINKING])
def test_any_number_of_empty_lines_is_looked_at_once(stage: ThinkStage) -> None:
    splitter = ThinkSplitter(tags_of(stage, are_tokens=False), stage)
    for _ in range(1000):
        assert splitter.push("\n") == ("", "")
        assert splitter._held == ""
    thought, said = splitter.push("a")
    assert thought + said == ("a" if stage is ThinkStage.OPENED else "\n" * 1000 + "a")
