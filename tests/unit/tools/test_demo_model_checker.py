"""The checker accepts what the grammar writes and rejects every small damage to it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.demo_model.checker import Message, check
from tools.demo_model.grammar import ABOUT_STORY, FULL_STORY_EXCHANGE, SUMS, Grammar, Turn, sample_conversations
from tools.demo_model.words import FRIENDS, HEROES, KINDS, PLACES

SEEDS = st.integers(0, 10**6)


def story(seed: int) -> Turn:
    """Return a turn whose prompt fixes kind, place and wish."""
    return Grammar(seed).turn(FULL_STORY_EXCHANGE, {})


def accepts(messages: Sequence[Message], answer: str) -> bool:
    return check(messages, answer).accepted


def ask(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_every_answer_of_the_grammar_is_accepted(held_out: bool) -> None:
    for chat in sample_conversations(31, 300, held_out=held_out):
        for index, message in enumerate(chat.messages):
            if message["role"] == "assistant":
                assert accepts(chat.messages[:index], message["content"]), chat.messages[: index + 1]


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
