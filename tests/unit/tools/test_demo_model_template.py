"""Writing and reading walk the same tree: what one produces, the other accepts, and nothing else."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.demo_model.template import Case, Chain, Closed, Entity, Let, Literal, Node, Templates, Writer, readings

ANIMALS = [Entity("owl", {"a": "an owl"}), Entity("fox", {"a": "a fox"}), Entity("ox", {"a": "an ox"})]
T = Templates({"hero": Closed(ANIMALS), "friend": Closed(ANIMALS, unlike="hero")})


def write(node: Node, seed: int) -> Writer:
    out = Writer(Random(seed), {})
    node.write(out)
    return out


def accepted(node: Node, text: str) -> bool:
    return next(iter(readings(node, text, {})), None) is not None


TEMPLATES = st.recursive(
    st.sampled_from(["{hero}", "{hero.a}", "{friend}", "a", "b c", " ", "owl", "."]),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: "[" + "|".join(options) + "|]"),
    ),
    max_leaves=8,
)


@given(template=TEMPLATES, seed=st.integers(0, 1000))
def test_every_written_text_is_read_with_the_bindings_it_was_written_with(template: str, seed: int) -> None:
    node = T.one(template)
    out = write(node, seed)
    assert any(env.items() >= out.env.items() for env in readings(node, out.text, {}))


@given(
    choices=st.lists(st.lists(st.sampled_from(["a", "ab", "b", ""]), min_size=1, max_size=3), min_size=1, max_size=4),
    text=st.text("ab", max_size=6),
)
def test_without_slots_reading_agrees_with_a_regular_expression(choices: list[list[str]], text: str) -> None:
    node = T.one("".join("[" + "|".join(options) + "]" for options in choices))
    pattern = "".join("(?:" + "|".join(options) + ")" for options in choices)
    assert accepted(node, text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("An owl met a fox. The owl sang.", True),
        ("An owl met a fox. The fox sang.", False),  # another hero
        ("An owl met an owl. The owl sang.", False),  # the friend is somebody else
        ("An owl met a fox. The owl sang", False),
        ("An owl met a fox. The owl sang. ", False),
        ("A owl met a fox. The owl sang.", False),
    ],
)
def test_a_bound_variable_stays_the_same(text: str, expected: bool) -> None:
    node = Chain([Literal("A"), T.one("[n {hero}| {hero}]")])
    story = T.one("[{hero.a}] met {friend.a}. The {hero} sang.")
    assert accepted(node, "An owl") is True
    assert accepted(story, text[0].lower() + text[1:]) is expected


def test_a_case_follows_its_variable() -> None:
    node = Chain(
        [T.one("{hero}:"), Case("hero", {"owl": Literal("hoot"), "fox": Literal("yap"), "ox": Literal("moo")})]
    )
    assert accepted(node, "owl:hoot")
    assert not accepted(node, "owl:moo")


def test_let_refuses_another_binding() -> None:
    node = Chain([T.one("{hero}"), Let("hero", ANIMALS[0])])
    assert accepted(node, "owl")
    assert not accepted(node, "fox")


def test_capital_slots_capitalise_the_form() -> None:
    node = T.one("{hero} {Hero.a}")
    assert accepted(node, "owl An owl")
    assert not accepted(node, "owl an owl")


@pytest.mark.parametrize("template", ["[a", "a]", "a|b", "[a|[b]"])
def test_unbalanced_templates_are_refused(template: str) -> None:
    with pytest.raises(AssertionError):
        T.one(template)


def test_choices_cost_the_log_of_their_number() -> None:
    out = write(T.one("[a|b|c|d] {hero}"), seed=3)
    assert out.choice_nats == pytest.approx(1.3862943611 + 1.0986122887)  # ln 4 + ln 3
