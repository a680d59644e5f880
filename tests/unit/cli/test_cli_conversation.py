"""A conversation in the terminal: what is sent along, and what its commands change."""

from __future__ import annotations

import pytest

from cli.conversation import HELP, MAX_MESSAGES, PARAMETERS, Conversation, Pacing, Talk


def contents(conversation: Conversation, text: str = "next") -> list[str]:
    return [f"{each['role'][0]}:{each['content']}" for each in conversation.with_next(text)]


def test_the_newest_messages_go_along_and_the_system_prompt_always() -> None:
    conversation = Conversation(Talk(Pacing(), "Be brief"))
    for number in range(MAX_MESSAGES):
        conversation.add(f"q{number}", f"a{number}")
    sent = contents(conversation)
    assert sent[0] == "s:Be brief"
    assert sent[-3:] == [f"u:q{MAX_MESSAGES - 1}", f"a:a{MAX_MESSAGES - 1}", "u:next"]
    assert len(sent) == 1 + MAX_MESSAGES


def test_a_message_that_got_no_answer_is_as_if_it_had_not_been_said() -> None:
    conversation = Conversation(Talk(Pacing()))
    conversation.add("too long", "")
    conversation.add("hello", "Hel")
    assert contents(conversation) == ["u:hello", "a:Hel", "u:next"]


def test_clear_forgets_what_was_said_and_leaves_the_rest() -> None:
    conversation = Conversation(Talk(Pacing(), "Be brief"))
    conversation.add("hello", "Hello")
    assert conversation.obey("/clear") == "2 messages are forgotten"
    assert contents(conversation) == ["s:Be brief", "u:next"]


def test_the_system_prompt_is_shown_changed_and_taken_away() -> None:
    conversation = Conversation(Talk(Pacing()))
    said = [conversation.obey(line) for line in ("/system", "/system  Rhyme, please ", "/system", "/system -")]
    assert said == ["no system prompt", "Rhyme, please", "Rhyme, please", "no system prompt"]
    assert contents(conversation) == ["u:next"]


@pytest.mark.parametrize(
    ("line", "params", "said"),
    [
        ("/set temperature 0.5", {"seed": 3, "temperature": 0.5}, "temperature: 0.5\n"),
        ("/set max_tokens 20", {"seed": 3, "max_tokens": 20}, "max_tokens: 20\n"),
        ("/set seed -", {}, "seed: the model's own"),
        ("/set", {"seed": 3}, "seed: 3"),
        ("/set seed", {"seed": 3}, "/set NAME VALUE; NAME is one of "),
        ("/set color 3", {"seed": 3}, "/set NAME VALUE; NAME is one of "),
        ("/set max_tokens 0.5", {"seed": 3}, "0.5 is no value of max_tokens"),
    ],
)
def test_parameters_are_shown_and_changed(line: str, params: dict[str, float], said: str) -> None:
    conversation = Conversation(Talk(Pacing(), params={"seed": 3}))
    assert said in conversation.obey(line)
    assert conversation.talk.params == params


def test_the_pace_is_shown_and_changed() -> None:
    conversation = Conversation(Talk(Pacing()))
    assert [conversation.obey(line) for line in ("/pace", "/pace reading")] == ["smooth", "reading"]
    assert conversation.obey("/pace fast") == "/pace MODE; MODE is one of reading, smooth, off"
    assert conversation.talk.pacing == Pacing("reading")


def test_help_names_every_command_and_what_is_none_points_to_it() -> None:
    conversation = Conversation(Talk(Pacing()))
    assert conversation.obey("/help") == conversation.obey("/?") == HELP
    assert all(name in HELP for name in ("/clear", "/system", "/set", "/pace", "/bye", "Ctrl-C", *PARAMETERS))
    assert conversation.obey("/frobnicate now") == "there is no command /frobnicate; /help shows those there are"
