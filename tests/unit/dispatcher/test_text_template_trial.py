"""A template that takes too much is refused before this process compiles it (row 43 of the table of bad inputs)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.dispatcher.build import load_text
from services.dispatcher.text import template
from services.dispatcher.text.template import MAX_MESSAGES, ChatTemplate, TemplateRefusalError
from services.dispatcher.text.template_trial import LENGTHS, find_max_messages
from shared.errors import StartupError
from tests.support.dispatchers import make_settings
from tests.support.text_models import CHATML, write_model_folder

HUGE = "{{ 'a' * 10 ** 9 }}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x"
HELLO = [{"role": "user", "content": "hi"}]


def find(source: str) -> int:
    return find_max_messages(source, (), "the folder")


def test_an_ordinary_template_takes_every_conversation() -> None:
    assert find(CHATML) == MAX_MESSAGES


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        HUGE,
        "{{ ('%' ~ '1000000000' ~ 'd') | format(1) }}",
        "{% if messages | length > 3 %}" + ENDLESS + "{% endif %}",
    ],
    ids=["loops", "constant", "format", "longer conversations"],
)
def test_a_template_that_takes_too_much_is_refused_in_good_time_by_name(source: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(StartupError, match=r"the chat template in the folder takes more than 1 s and 512 MiB for 9"):
        find(source)
    assert time.monotonic() - started_s < 20


@pytest.mark.slow
def test_a_template_that_is_slow_for_long_conversations_is_given_shorter_ones() -> None:
    """A loop of n³ / 1000 steps: nothing for 99 messages, 10⁹ for 9 999."""
    source = "{% for a in messages %}{% for b in messages %}{% for c in range(messages | length // 100) %}{% endfor %}"
    source += "{% endfor %}{% endfor %}{{ messages[0].content }}"
    most = find(source)
    assert most in LENGTHS[1:3]
    slow = ChatTemplate(source, {}, max_messages=most)
    assert slow.render(HELLO) == "hi"
    with pytest.raises(TemplateRefusalError, match=f"at most {most} messages"):
        slow.render(HELLO * (most + 1))


def test_what_is_no_template_is_said_by_the_one_who_compiles_it() -> None:
    assert find("{% if %}") == MAX_MESSAGES
    for source in ("{% if %}", "{% for a in b %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 5000 + ")" * 5000 + " }}"):
        with pytest.raises(StartupError, match="not valid Jinja"):
            ChatTemplate(source, {})


def test_a_template_that_wants_the_assistant_to_have_the_last_word_is_tried() -> None:
    guard = "{% if messages[-1].role == 'user' %}{{ raise_exception('no answer') }}{% endif %}"
    slow = "{% for a in messages %}{% for b in messages %}{{ b.content }}{% endfor %}{% endfor %}"
    assert find(guard + slow) < MAX_MESSAGES


def test_a_template_that_refuses_the_trial_is_taken() -> None:
    assert find("{{ raise_exception('never') }}") == MAX_MESSAGES


@pytest.mark.parametrize("as_file", [False, True])
def test_a_dispatcher_does_not_start_with_it_and_names_the_file(tmp_path: Path, as_file: bool) -> None:
    folder = write_model_folder(tmp_path, template=None if as_file else HUGE)
    if as_file:
        (folder / "chat_template.jinja").write_text(HUGE)
    name = "chat_template.jinja" if as_file else "tokenizer_config.json"
    with pytest.raises(StartupError, match=f"the chat template in {folder / name} takes more than"):
        load_text(make_settings(folder))


def test_what_a_template_makes_is_bounded_in_length_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    repeating = ChatTemplate("{% for a in range(1000) %}{{ messages[0].content }}{% endfor %}", {})
    assert len(repeating.render(HELLO)) == 2000
    monkeypatch.setattr(template, "MAX_RENDERED_CHARS", 1999)
    with pytest.raises(TemplateRefusalError, match="more than 1999 characters"):
        repeating.render(HELLO)
    monkeypatch.setattr(template, "RENDER_LIMIT_S", 0.05)
    monkeypatch.setattr(template, "MAX_RENDERED_CHARS", 10**9)
    nested = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    with pytest.raises(TemplateRefusalError, match=r"more than 0\.05 s"):
        ChatTemplate(nested, {}).render(HELLO)
