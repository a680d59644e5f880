"""The client in JavaScript: its own tests pass, and its types are those of what it exports, and of the interface."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sluice_client import errors
from tests.support.javascript import CLIENT, NODE, run, run_node

TYPES = (CLIENT / "index.d.ts").read_text(encoding="utf-8")
API = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
OPTIONS = {"model", "stream", "qoe"}
"""Parameters that a call takes by an option of its own, or sets."""
needs_node = pytest.mark.skipif(NODE is None, reason="node is not on PATH: the client in JavaScript was not tested")


@needs_node
@pytest.mark.parametrize("name", [path.name for path in sorted(CLIENT.glob("*.test.js"))])
async def test_its_own_tests_pass(name: str) -> None:
    output = await run_node(["--test", "--test-reporter=tap", CLIENT / name])
    assert re.search(r"^# pass [1-9]", output, re.MULTILINE), output
    assert "# fail 0\n" in output


@needs_node
async def test_what_it_exports_is_what_its_types_declare() -> None:
    declared = re.findall(r"^export (?:class|const|function) (\w+)", TYPES, re.MULTILINE)
    assert len(declared) == len(set(declared))
    assert sorted(await run("return Object.keys(sdk)")) == sorted(declared)


def test_its_errors_are_those_of_python() -> None:
    declared = re.findall(r"^export class (\w+Error) extends (\w+)", TYPES, re.MULTILINE)
    in_python = {name: value.__bases__[0].__name__ for name, value in vars(errors).items() if isinstance(value, type)}
    assert dict(declared) == {**in_python, "SluiceClientError": "Error"}


def parameters(heading: str) -> set[str]:
    """Return the names in one table of the page's parameters."""
    table = API[API.index(f"\n{heading}\n") :].split("\n\n")[1]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    assert rows
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def fields(interface: str) -> set[str]:
    """Return the fields of an interface by itself."""
    body = re.search(rf"^export interface {interface}\b.*?\{{\n(.*?)^\}}", TYPES, re.MULTILINE | re.DOTALL)
    assert body
    return set(re.findall(r"^  (\w+)\?:", body[1], re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "interface", "positional"),
    [
        ("Chat only:", "ChatParams", {"messages"}),
        ("Completions only:", "CompletionParams", {"prompt"}),
        ("Both:", "RequestParams", OPTIONS),
    ],
)
def test_its_types_have_every_parameter_of_the_interface(heading: str, interface: str, positional: set[str]) -> None:
    assert parameters(heading) - positional <= fields(interface)


def test_its_package_has_all_that_it_imports() -> None:
    package = json.loads((CLIENT / "package.json").read_text())
    assert "dependencies" not in package
    for path in CLIENT.glob("*.js"):
        imported = re.findall(r'^(?:import|export) .*?from "(.+?)";', path.read_text(), re.MULTILINE | re.DOTALL)
        foreign = {name for name in imported if not name.startswith("./")}
        assert all((CLIENT / name).is_file() for name in imported if name not in foreign)
        assert not foreign or (".test." in path.name and all(name.startswith("node:") for name in foreign))
