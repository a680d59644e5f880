"""The grammar writes the same from the same seed, long enough, in one part of the prompts."""

from __future__ import annotations

import re

import pytest

from tests.support.traces import outputs_of
from tools.demo_model import foreign
from tools.demo_model.evaluate import PLAN, assert_disjoint, held_out_prompts
from tools.demo_model.grammar import (
    ABOUT_STORY,
    CALLS,
    COMPANY,
    EXCHANGES,
    FACTS,
    NEW_AS_JSON,
    RESULTS,
    STORY_EXCHANGE,
    SUMS,
    Exchange,
    Grammar,
    sample_conversations,
)
from tools.demo_model.story import WISH_ENTITIES
from tools.demo_model.words import COLOURS, FRIENDS, HEROES, KINDS, PLACES

PRINT_HASH = (
    "import zlib; from tools.demo_model.grammar import sample_conversations as s;"
    "print(zlib.crc32(repr([c.messages for c in s(4, 50)]).encode()))"
)


def test_the_same_seed_writes_the_same_in_processes_with_different_hash_seeds() -> None:
    assert len(outputs_of(PRINT_HASH)) == 1


def test_another_seed_writes_something_else() -> None:
    assert sample_conversations(1, 5) != sample_conversations(2, 5)


def test_stories_have_the_length_that_streams_for_half_a_minute() -> None:
    grammar = Grammar(6)
    words = [len(grammar.turn(STORY_EXCHANGE, {}).answer.split()) for _ in range(300)]
    assert all(70 <= count <= 220 for count in words)
    assert sum(80 <= count <= 180 for count in words) > 270


def test_stories_are_whole() -> None:
    grammar = Grammar(8)
    for _ in range(100):
        turn = grammar.turn(STORY_EXCHANGE, {})
        assert turn.answer.count("\n\n") == 3
        assert turn.answer.endswith((".", "!"))
        assert not set("{}[]|") & set(turn.answer + turn.prompt)
        assert "  " not in turn.answer
        assert {"hero", "kind", "place", "wish", "friend", "colour", "tool"} <= set(turn.env)


@pytest.mark.parametrize("entities", [HEROES, FRIENDS, KINDS, PLACES, COLOURS, WISH_ENTITIES])
def test_keys_are_unique(entities: list[object]) -> None:
    keys = [getattr(entity, "key") for entity in entities]  # noqa: B009 - several domains, one check
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("exchange", [*COMPANY, *FACTS, *SUMS, STORY_EXCHANGE], ids=lambda exchange: exchange.name)
def test_every_kind_of_turn_has_prompts_in_both_parts(exchange: Exchange) -> None:
    training = {Grammar(1).turn(exchange, {}).prompt for _ in range(3)}
    held_out = {Grammar(1, held_out=True).turn(exchange, {}).prompt for _ in range(3)}
    assert training
    assert held_out
    assert not training & held_out


def test_training_conversations_contain_no_held_out_turn() -> None:
    assert not any(turn.is_held_out for chat in sample_conversations(12, 400) for turn in chat.turns)
    grammar = Grammar(12)
    assert not any(turn.is_held_out for _ in range(400) for turn in grammar.form().turns)


def test_conversations_without_the_forms_are_as_they_were() -> None:
    """So the tokenizer, which is trained on them, is too."""
    said = [turn.said for chat in sample_conversations(12, 200) for turn in chat.turns]
    assert not any(tag in text for text in said for tag in ("<", "{", "JSON"))


def test_every_form_is_written() -> None:
    grammar = Grammar(9)
    chats = [grammar.form() for _ in range(300)]
    turns = [turn for chat in chats for turn in chat.turns]
    assert {exchange.name for exchange in (*CALLS, *RESULTS, *NEW_AS_JSON)} <= {turn.exchange.name for turn in turns}
    for chat in chats:
        roles = [turn.exchange.role for turn in chat.turns[1:]]
        assert roles == ["tool" if turn.is_call else "user" for turn in chat.turns[:-1]]
        assert not any(turn.has_thought for turn in chat.turns[:-1])
        has_adder = any(re.fullmatch(r"add", tool["function"]["name"]) for tool in chat.tools)
        assert has_adder or not any(turn.is_call for turn in chat.turns)


def test_held_out_prompts_are_disjoint_from_training_and_all_different() -> None:
    prompts = held_out_prompts(5)
    assert len(prompts) == sum(subject.count for subject in PLAN) >= 400
    assert assert_disjoint(prompts, sample_conversations(12, 400)) == 400


def test_a_prompt_that_was_trained_on_is_found() -> None:
    with pytest.raises(AssertionError, match="trained on"):
        assert_disjoint(held_out_prompts(5), sample_conversations(5, 50, held_out=True))


def test_questions_about_a_story_need_one() -> None:
    assert all(exchange.start({}) is None for exchange in ABOUT_STORY)
    assert {exchange.name for exchange in EXCHANGES if exchange.start({}) is not None} >= {"story", "sum", "foreign"}


def test_foreign_subjects_are_many() -> None:
    assert len(foreign.TOPICS.entities) > 100
