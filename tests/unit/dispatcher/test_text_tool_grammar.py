"""The grammar of answers that have to call: valid calls pass token by token, others are stopped at one."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from services.dispatcher.endpoints.schema_rules import prepare_schema
from services.dispatcher.text.tool_calls import CallPiece, ToolCallParser
from services.dispatcher.text.tool_forms import FORMS, ModelCalls
from services.dispatcher.text.tool_grammar import tool_grammar
from services.dispatcher.text.tools import Tool, ToolUse
from shared.grammars import GrammarCompiler
from tests.support.tool_templates import tool_json

KINDS: Final = ("special", "plain", "text")
SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -9, "maximum": 99}, "b": {"enum": ["<tool_cal", 'é"}', "c"]}},
    "required": ["a"],
    "additionalProperties": False,
}
EMPTY: Final = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, schema: dict[str, Any] | None = None, *, strict: bool = False) -> Tool:
    function = {"name": name, "parameters": SCHEMA if schema is None else schema}
    return Tool(name, {"type": "function", "function": function}, strict)


class Model:
    """A vocabulary, its tags as tokens or not, and the compiler for it."""

    def __init__(self, name: str, kind: str) -> None:
        form = FORMS[name]
        source = tool_json(**{} if kind == "text" else {kind: form.tags})
        self.tokenizer = Tokenizer.from_str(source)
        ids = {} if kind == "text" else {tag: self.id_of(tag) for tag in form.tags}
        special = {token_id: tag for tag, token_id in ids.items()} if kind == "special" else {}
        self.calls = ModelCalls(form, ids, special)
        self.end_id = self.id_of("<|im_end|>")
        self.compiler = GrammarCompiler(source, self.tokenizer.get_vocab_size(), [self.end_id])

    def id_of(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None
        return token_id

    def call(self, name: str, arguments: str) -> str:
        written = self.calls.written
        if written.name_end:
            return name + written.name_end + arguments
        return f'{{"name": "{name}", "{self.calls.form.arguments_name}": {arguments}}}'

    def answer(self, *calls: str) -> str:
        written = self.calls.written
        return "".join(written.before) + "".join(written.between).join(calls) + "".join(written.after)

    def num_taken(self, use: ToolUse, text: str, said: dict[str, Any] | None = None) -> tuple[int, bool]:
        """Return how many tokens of a text pass, and whether the answer may end there."""
        matcher = self.compiler.compile(tool_grammar(self.calls, use, said))
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        num_taken = next((i for i, token in enumerate(ids) if not matcher.consume_token(token)), len(ids))
        return num_taken - len(ids), num_taken == len(ids) and matcher.is_accepting()

    def takes(self, use: ToolUse, text: str, said: dict[str, Any] | None = None) -> bool:
        return self.num_taken(use, text, said) == (0, True)

    def walk(self, use: ToolUse, rng: random.Random) -> str:
        """Return the text of tokens that were drawn from those that are allowed."""
        matcher = self.compiler.compile(tool_grammar(self.calls, use))
        ids: list[int] = []
        while not matcher.is_stopped() and len(ids) < 600:
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [token for token in range(self.tokenizer.get_vocab_size()) if mask >> token & 1]
            token = self.end_id if self.end_id in allowed and rng.random() < 0.5 else rng.choice(allowed)
            assert matcher.consume_token(token)
            if token == self.end_id:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            ids.append(token)
        assert matcher.is_stopped()
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@cache
def model_of(name: str, kind: str) -> Model:
    return Model(name, kind)


@pytest.fixture(params=[(name, kind) for name in FORMS for kind in KINDS], ids="-".join)
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(*request.param)


def read(model: Model, text: str) -> tuple[str, list[CallPiece], int]:
    parser = ToolCallParser(model.calls.form, str)
    said = parser.push(text) + parser.flush()
    return said, parser.take(), parser.num_completed


VALID: Final = ('{"a": 7}', '{"a": -9, "b": "c"}', '{"a": 1, "b": "<tool_cal"}')
INVALID: Final = ('{"a": "7"}', '{"a": 100}', '{"b": "c"}', '{"a": 1, "b": "d"}', '{"a": 1, "c": 1}', "{}", "7", "null")
BOTH: Final = (tool("add"), tool("ad", EMPTY))


def test_required_calls_are_calls_of_a_tool_that_match_its_schema(model: Model) -> None:
    use = ToolUse(BOTH, is_required=True)
    for arguments in VALID:
        text = model.answer(model.call("add", arguments))
        assert model.takes(use, text)
        assert model.takes(use, "\n\n" + text)
        assert read(model, text)[1:] == ([CallPiece(0, arguments, "0", "add")], 1)
        assert model.takes(use, model.answer(model.call("add", arguments), model.call("ad", "{}")))
    for arguments in INVALID:
        assert not model.takes(use, model.answer(model.call("add", arguments)))
    for text in ("So", "", model.answer(model.call("none", "{}")), model.answer(model.call("ad", '{"a": 1}'))):
        assert not model.takes(use, text)
    assert not model.takes(use, model.answer(model.call("add", VALID[0])) + "So")


def test_one_call_is_made_where_one_may_be(model: Model) -> None:
    one, two = model.answer(model.call("ad", "{}")), model.answer(model.call("ad", "{}"), model.call("ad", "{}"))
    for use in (ToolUse(BOTH, is_required=True, is_parallel=False), ToolUse(BOTH, is_required=True, named="ad")):
        assert model.takes(use, one)
        assert not model.takes(use, two)
    assert not model.takes(ToolUse(BOTH, is_required=True, named="ad"), model.answer(model.call("add", VALID[0])))


def test_with_a_strict_tool_text_is_free_and_a_call_is_one(model: Model) -> None:
    use = ToolUse((tool("add", strict=True), tool("ad", {})))
    good, bad = (model.answer(model.call("add", arguments)) for arguments in (VALID[0], INVALID[0]))
    before = "" if not model.calls.written.before else "So {1}: [x] é🦊\n"
    for text in ("", " \n", "So <b>{}", before + good, before + model.answer(model.call("ad", '{"x": [1]}'))):
        assert model.takes(use, text), text
    for text in (before + bad, before + model.answer(model.call("none", "{}"))):
        assert not model.takes(use, text), text
    if model.calls.written.before:
        assert model.takes(use, before + good + "\nAnd " + good + " so.")
        single = ToolUse(use.tools, is_parallel=False)
        assert model.takes(single, before + good)
        assert not model.takes(single, before + good + good)


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_answer_of_a_form_calls_or_is_of_the_form(model: Model, is_strict: bool) -> None:
    if not model.calls.written.before:
        pytest.skip("its calls begin like JSON")
    said = prepare_schema({"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]})
    use = ToolUse((tool("add", strict=is_strict), tool("ad", EMPTY)))
    good, bad = (model.answer(model.call("add", arguments)) for arguments in (VALID[0], INVALID[0]))
    for text in (good, '{"sum": 7}', '\n{"sum":7}', model.answer(model.call("add", VALID[0]), model.call("ad", "{}"))):
        assert model.takes(use, text, said), text
    for text in (bad, "So", "", '{"sum": "7"}', good + '{"sum": 7}'):
        assert not model.takes(use, text, said), text
    assert not model.takes(ToolUse(use.tools, is_required=True), '{"sum": 7}', said), "it has to call"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_passes_is_read_as_calls(model: Model, seed: int) -> None:
    """Tokens are drawn at random: the parser finds what the grammar has let through."""
    rng = random.Random(seed)
    said, pieces, num_whole = read(model, model.walk(ToolUse(BOTH, is_required=True), rng))
    assert said == ""
    assert len(pieces) == num_whole >= 1
    for piece in pieces:
        arguments = json.loads(piece.arguments)
        assert piece.name in ("add", "ad")
        assert set(arguments) <= {"a", "b"}
        assert (piece.name == "ad") == (arguments == {})


def test_nothing_is_enforced_where_nothing_is_strict(model: Model) -> None:
    assert tool_grammar(model.calls, ToolUse(BOTH)) == b""
    assert tool_grammar(model.calls, ToolUse(BOTH, is_parallel=False)) == b""


def test_a_schema_that_the_library_knows_in_part_is_kept_to_in_part_unless_it_is_strict() -> None:
    model = model_of("hermes", "plain")
    schema = {"properties": {"a": {"type": "string", "not": {"const": "x"}}}, "uniqueItems": True}
    assert model.takes(ToolUse([tool("f", schema)], is_required=True), model.answer(model.call("f", '{"a": "x"}')))
    assert not model.takes(ToolUse([tool("f", schema)], is_required=True), model.answer(model.call("f", '{"a": 1}')))
    with pytest.raises(ValueError, match="not"):
        model.takes(ToolUse([tool("f", schema, strict=True)]), "")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({}, ['{"a": [1]}', "{}"], ["[]", "1"]),
        ({"$defs": {"a": EMPTY}, "$ref": "#/$defs/a"}, ["{}"], ['{"a": 1}']),
        ({"type": ["object", "null"]}, ["{}"], ["null"]),
        ({"type": "object", "properties": {"é": {"const": "🦊/"}}}, ['{"é": "🦊/"}'], ['{"é": "/"}']),
        ({"type": "object", "x-guidance": {"whitespace_flexible": True}}, ['{"a": 1}'], ['{"a":  1}']),
    ],
)
def test_arguments_are_an_object_whatever_the_schema(
    schema: dict[str, Any], valid: Sequence[str], invalid: Sequence[str]
) -> None:
    model = model_of("hermes", "plain")
    use = ToolUse([tool("f", schema, strict=True)], is_required=True)
    assert all(model.takes(use, model.answer(model.call("f", arguments))) for arguments in valid)
    assert not any(model.takes(use, model.answer(model.call("f", arguments))) for arguments in invalid)
