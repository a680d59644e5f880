"""The table of clients: what is written is what is read again, and each reason stands once."""

from __future__ import annotations

from tests.clients.catalogue import ABILITIES
from tests.clients.table import read, render

VERSIONS = {"one": "1.0", "two": "2.0"}


def test_a_table_says_what_works_and_why_something_does_not() -> None:
    outcomes = {
        "one": {"chat": "yes", "stream": "no: BadRequestError: `tools`?", "stop": "no: late"},
        "two": {"chat": "no: late", "usage": "yes"},
    }
    lines = render(outcomes, VERSIONS).splitlines()
    assert lines[:3] == ["|  | one | two |", "|---|---|---|", "| version | 1.0 | 2.0 |"]
    assert f"| {ABILITIES['chat']} | yes | no (1) |" in lines
    assert f"| {ABILITIES['stop']} | no (1) | – |" in lines
    assert lines[-3:] == ["|---|---|", "| 1 | `late` |", "| 2 | `BadRequestError: 'tools'?` |"]


def test_what_is_written_is_read_again_without_reasons() -> None:
    outcomes = {"one": dict.fromkeys(ABILITIES, "yes"), "two": {"chat": "no: late", "usage": "yes"}}
    text = "# Page\n\nIntro | with a bar.\n\n" + render(outcomes, VERSIONS)
    assert read(text, ["one", "two"]) == {**outcomes, "two": {"chat": "no", "usage": "yes"}}


def test_what_differs_from_run_to_run_is_left_out_of_a_reason() -> None:
    text = render({"one": {"chat": "no: chatcmpl-8f3a at 127.0.0.1:40123 for req_9"}}, VERSIONS)
    assert text.splitlines()[-1] == "| 1 | `… at … for …` |"


def test_a_reason_stands_once_however_libraries_wrap_it() -> None:
    wrapped = ["BadRequestError: No.", "BadRequestError: 400 No.", "BadRequestError: Error code: 400 - No."]
    wrapped.append("BadRequestError: Error code: 400 - litellm.BadRequestError: OpenAIException - No.")
    outcomes = {str(index): {"chat": f"no: {reason}"} for index, reason in enumerate(wrapped)}
    text = render(outcomes, dict.fromkeys(outcomes, "1"))
    assert text.splitlines()[-2:] == ["|---|---|", "| 1 | `BadRequestError: No.` |"]
