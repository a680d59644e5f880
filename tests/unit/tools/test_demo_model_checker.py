"""The checker accepts what the grammar writes and rejects every small damage to it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.demo_model.checker import Message, check
from tools.demo_model.forms import call_message, tool
from tools.demo_model.grammar import (
    ABOUT_STORY,
    ANOTHER_EXCHANGE,
    FACTS,
    FULL_STORY_EXCHANGE,
    NEW_AS_JSON,
    SUMS,
    TOLD_AS_JSON,
    Exchange,
    Grammar,
    Turn,
    sample_conversations,
)
from tools.demo_model.words import FRIENDS, HEROES, KINDS, PLACES

SEEDS = st.integers(0, 10**6)


def story(seed: int) -> Turn:
    """Return a turn whose prompt fixes kind, place and wish."""
    return Grammar(seed).turn(FULL_STORY_EXCHANGE, {})


def accepts(messages: Sequence[Message], answer: str) -> bool:
    return check(messages, answer).accepted


def ask(prompt: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}]


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_every_answer_of_the_grammar_is_accepted(held_out: bool) -> None:
    for chat in sample_conversations(31, 300, held_out=held_out):
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                assert accepts(chat.messages[:index], message["content"]), chat.messages[: index + 1]


def test_every_answer_of_the_forms_is_accepted() -> None:
    grammar = Grammar(32)
    for _ in range(60):
        chat = grammar.form()
        turn = chat.turns[-1]
        messages, thinking = chat.messages[:-1], chat.is_thinking
        assert check(messages, turn.said, tools=chat.tools, thinking=thinking).accepted, messages
        assert not check(messages, turn.said, tools=chat.tools, thinking=not thinking).accepted


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, fraction=st.floats(0.02, 0.98))
def test_a_cut_story_is_rejected(seed: int, fraction: float) -> None:
    turn = story(seed)
    body = re.sub(r" (The end|And that is the end of the story|Good night)\.$", "", turn.answer)
    assert not accepts(ask(turn.prompt), body[: int(len(body) * fraction)])


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, variable=st.sampled_from(["hero", "friend", "kind", "place", "tool"]), data=st.data())
def test_one_changed_mention_is_rejected(seed: int, variable: str, data: st.DataObject) -> None:
    """Kind and place are in the request, so one mention suffices; the rest must be mentioned twice."""
    turn = story(seed)
    word = turn.env[variable].key
    places = [found.start() for found in re.finditer(rf"\b{re.escape(word)}\b", turn.answer, re.IGNORECASE)]
    assert len(places) >= (1 if variable in ("kind", "place") else 2)
    others = {"hero": HEROES, "friend": FRIENDS, "kind": KINDS, "place": PLACES}.get(variable, KINDS)
    other = data.draw(st.sampled_from([entity.key for entity in others if entity.key != word]))
    at = data.draw(st.sampled_from(places))
    assert not accepts(ask(turn.prompt), turn.answer[:at] + other + turn.answer[at + len(word) :])


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_a_changed_pronoun_is_rejected(seed: int) -> None:
    turn = next(turn for turn in map(story, range(seed, seed + 100)) if turn.env["hero"] in HEROES)
    subject = str(turn.env["hero"].form("they"))
    other = "he" if subject == "she" else "she"
    story_part = turn.answer.split("\n\n")[0]  # before the friend, every pronoun is the hero's
    changed = re.sub(rf"\b{subject}\b", other, re.sub(rf"\b{subject.capitalize()}\b", other.capitalize(), story_part))
    assert story_part != changed, "the sentence on the dream starts with a pronoun"
    assert not accepts(ask(turn.prompt), turn.answer.replace(story_part, changed))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS)
def test_shuffled_sentences_are_rejected(seed: int) -> None:
    turn = story(seed)
    sentences = re.split(r"(?<=[.!?]) ", turn.answer)
    order = list(range(len(sentences)))
    Random(seed).shuffle(order)
    if order != list(range(len(sentences))):
        assert not accepts(ask(turn.prompt), " ".join(sentences[index] for index in order))


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS, word=st.sampled_from(["suddenly", "the", "database", "Mira", "not", "and"]), fraction=st.floats(0, 1)
)
def test_an_added_word_is_rejected(seed: int, word: str, fraction: float) -> None:
    turn = story(seed)
    words = turn.answer.split(" ")
    words.insert(int(fraction * len(words)), word)
    assert not accepts(ask(turn.prompt), " ".join(words))


@settings(max_examples=60, deadline=None)
@given(seed=SEEDS, fraction=st.floats(0, 0.999))
def test_a_dropped_word_is_rejected(seed: int, fraction: float) -> None:
    turn = story(seed)
    words = turn.answer.split(" ")
    dropped = words.pop(int(fraction * len(words)))
    assert not accepts(ask(turn.prompt), " ".join(words)), dropped


@settings(max_examples=40, deadline=None)
@given(seed=SEEDS)
def test_a_story_for_another_request_is_rejected(seed: int) -> None:
    first, second = story(seed), story(seed + 1)
    if first.env["kind"].key != second.env["kind"].key:
        assert not accepts(ask(first.prompt), second.answer)


def test_text_after_the_end_is_rejected() -> None:
    turn = story(4)
    assert not accepts(ask(turn.prompt), turn.answer + " " + turn.answer)
    assert not accepts(ask(turn.prompt), turn.answer + " ")


@pytest.mark.parametrize(
    ("prompt", "good", "bad"),
    [
        ("What is 3 + 4?", "3 + 4 = 7.", "3 + 4 = 8."),
        ("What is 3 + 4?", "3 plus 4 is 7.", "4 plus 3 is 7."),
        ("What is the opposite of hot?", "The opposite of hot is cold.", "The opposite of hot is warm."),
        ("Where does a bee live?", "A bee lives in a hive.", "A bee lives in a nest."),
        ("Count to three.", "Of course: one, two, three.", "Of course: one, two, three, four."),
        ("Which day comes after Sunday?", "After Sunday comes Monday.", "After Sunday comes Tuesday."),
        ("How many legs does a spider have?", "A spider has eight legs.", "A spider has six legs."),
        ("What colour is the sky?", "The sky is blue.", "The sky is green."),
    ],
)
def test_a_fact_has_one_answer(prompt: str, good: str, bad: str) -> None:
    assert accepts(ask(prompt), good)
    assert not accepts(ask(prompt), bad)


def test_all_sums_are_right() -> None:
    grammar = Grammar(1)
    for _ in range(200):
        for exchange in SUMS:
            env = grammar.turn(exchange, {}).env["sum"]
            assert int(env.form("a")) + int(env.form("b")) == int(env.form("sum")) <= 20


def test_an_unknown_prompt_has_the_fallback_as_its_answer() -> None:
    fallback = "I do not know much about that. But I could tell you a little story about an owl."
    verdict = check(ask("Please prove Fermat's last theorem."), fallback)
    assert verdict.accepted
    assert not accepts(ask("Please prove Fermat's last theorem."), story(2).answer)
    assert not accepts(ask("Tell me a story."), fallback)


def test_a_question_about_the_story_is_answered_from_the_story() -> None:
    turn = story(9)
    chat = [*ask(turn.prompt), {"role": "assistant", "content": turn.answer}]
    for exchange in ABOUT_STORY:
        follow_up = Grammar(3).turn(exchange, turn.env)
        messages = [*chat, {"role": "user", "content": follow_up.prompt}]
        assert accepts(messages, follow_up.answer)
        other = Grammar(3).turn(exchange, story(10).env)
        assert not accepts(messages, other.answer)


def test_an_offered_story_is_about_the_kind_that_was_offered() -> None:
    offer = [*ask("Hello!"), {"role": "assistant", "content": "Good day to you! Would you like a story about a fox?"}]
    foxes = Grammar(3).turn(FULL_STORY_EXCHANGE, {})
    as_fox = re.sub(rf"\b{foxes.env['kind'].key}\b", "fox", foxes.answer)
    assert accepts([*offer, *ask("Yes, please.")], as_fox)
    assert not accepts([*offer, *ask("Yes, please.")], foxes.answer)


def test_a_system_message_changes_nothing() -> None:
    turn = story(3)
    assert accepts([{"role": "system", "content": "Be a pirate."}, *ask(turn.prompt)], turn.answer)


@pytest.mark.parametrize("roles", [[], ["assistant"], ["user", "assistant"], ["user", "user"]])
def test_a_chat_must_end_with_the_user(roles: list[str]) -> None:
    with pytest.raises(ValueError, match="a chat goes"):
        check([{"role": role, "content": "Hello!"} for role in roles], "Hello!")


def test_a_verdict_says_how_far_the_answer_was_right() -> None:
    turn = story(3)
    start = turn.answer[: turn.answer.index("\n\n")]
    verdict = check(ask(turn.prompt), start + " Then the server crashed.")
    assert not verdict.accepted
    assert verdict.explained.startswith(start)
    assert "crashed" not in verdict.explained


ADD = (tool("look", "where"), tool("add", "x", "y"))


def call(x: int, y: int, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": {x}, "y": {y}}}}}\n</tool_call>'


@pytest.mark.parametrize("prompt", ["What is 3 + 4?", "How much is three and four?"])
def test_a_sum_is_asked_of_the_tool_if_there_is_one(prompt: str) -> None:
    direct = "3 + 4 = 7." if "3" in prompt else "Three plus four is seven."
    assert check(ask(prompt), call(3, 4), tools=ADD).accepted
    for wrong in (call(4, 3), call(3, 5), call(3, 4, "sum"), call(3, 4).replace("x", "a"), call(3, 4)[:-1], direct):
        assert not check(ask(prompt), wrong, tools=ADD).accepted
    for others in ((), ADD[:1], (tool("add", "x"),), (tool("add", "x", "y", "z"),)):
        assert check(ask(prompt), direct, tools=others).accepted
        assert not check(ask(prompt), call(3, 4), tools=others).accepted


@pytest.mark.parametrize("result", ["7", "42", '{"result": 42}', "The sum is 42.", "999"])
@pytest.mark.parametrize("is_compact", [False, True])
def test_what_the_tool_says_is_what_is_answered(result: str, is_compact: bool) -> None:
    said = re.sub("[^0-9]", "", result)
    called = call_message(call(3, 4), is_compact=is_compact)
    messages = [*ask("What is 3 + 4?"), called, {"role": "tool", "tool_call_id": "call", "content": result}]
    assert check(messages, f"3 + 4 = {said}.", tools=ADD).accepted
    assert check(messages, f"3 plus 4 is {said}.", tools=ADD).accepted
    assert check(messages, f"The tool says {said}.\n</think>\n\n3 + 4 = {said}.", tools=ADD, thinking=True).accepted
    for wrong in ("3 + 4 = 8.", f"3 + 5 = {said}.", f"4 + 3 = {said}.", call(3, 4), f"{said}."):
        assert not check(messages, wrong, tools=ADD).accepted
    unread = [*messages[:-1], {"role": "tool", "content": "out of order"}]
    assert not check(unread, "3 + 4 = 7.", tools=ADD).accepted


@pytest.mark.parametrize("exchange", FACTS, ids=lambda exchange: exchange.name)
def test_tools_change_nothing_else(exchange: Exchange) -> None:
    turn = Grammar(4).turn(exchange, {})
    assert check(ask(turn.prompt), turn.answer, tools=ADD).accepted
    assert not check(ask(turn.prompt), call(3, 4), tools=ADD).accepted


@pytest.mark.parametrize("seed", range(5))
def test_the_parts_of_a_story_are_one_object_in_json(seed: int) -> None:
    told = story(seed)
    asked = Grammar(seed).turn(TOLD_AS_JSON, told.env)
    messages = [*ask(told.prompt), {"role": "assistant", "content": told.answer}, *ask(asked.prompt)]
    assert accepts(messages, asked.answer)
    parts = json.loads(asked.answer)
    hero, place = told.env["hero"].key, told.env["place"].form("the")
    assert parts == {
        "hero": f"a little {told.env['kind'].key} called {hero}",
        "place": place,
        "wish": f"to {told.env['wish'].key}",
    }
    for name, wrong in (("hero", "a little cow called Tim"), ("place", "the office"), ("wish", "to sleep")):
        assert not accepts(messages, json.dumps({**parts, name: wrong}))
    assert json.dumps(parts) == asked.answer
    assert not accepts(messages, json.dumps(parts, separators=(",", ":")))
    assert not accepts(messages, json.dumps(dict(reversed(parts.items()))))
    assert not accepts(messages, asked.answer + " That is all.")


@pytest.mark.parametrize("exchange", NEW_AS_JSON, ids=lambda exchange: exchange.name)
def test_the_parts_of_a_new_story_are_what_was_asked_for(exchange: Exchange) -> None:
    turns = [Grammar(seed).turn(exchange, {}) for seed in range(20)]
    for turn, other in pairwise(turns):
        assert accepts(ask(turn.prompt), turn.answer)
        fixed = re.search(r"about an? (?:\w+ )?(\w+)", turn.prompt)
        if fixed and fixed[1] not in other.answer:
            assert not accepts(ask(turn.prompt), other.answer)
    wanted = "Give me hero, place and wish of a story about a fox as JSON."
    assert accepts(ask(wanted), '{"hero": "a little fox called Mira", "place": "the sea", "wish": "to fly a kite"}')
    assert not accepts(ask(wanted), '{"hero": "a little cat called Mira", "place": "the sea", "wish": "to fly a kite"}')


def test_a_thought_is_one_line_and_right() -> None:
    messages = ask("What is 3 + 4?")
    assert check(messages, "3 and 4 more is 7.\n</think>\n\n3 + 4 = 7.", thinking=True).accepted
    for wrong in (
        "3 + 4 = 7.",
        "3 and 4 more is 8.\n</think>\n\n3 + 4 = 7.",
        "3 and 4 more is 7.\n</think>\n\n3 + 4 = 8.",
        "3 and 4 more is 7.</think>\n\n3 + 4 = 7.",
        "3 and 4 more is 7.\n3 and 4 more is 7.\n</think>\n\n3 + 4 = 7.",
        "\n</think>\n\n3 + 4 = 7.",
    ):
        assert not check(messages, wrong, thinking=True).accepted


def test_a_story_is_about_the_kind_that_was_thought_of() -> None:
    turn = Grammar(3).turn(ANOTHER_EXCHANGE, {}, thinking=True)
    assert check(ask(turn.prompt), turn.said, thinking=True).accepted
    other = "a whale" if "whale" not in turn.said else "a bee"
    changed = re.sub(r"think of an? \w+", f"think of {other}", turn.said)
    assert not check(ask(turn.prompt), changed, thinking=True).accepted
