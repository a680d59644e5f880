"""The client in JavaScript as a program has it: installed from its folder, taken by the compiler, run by a new Node."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.javascript import CLIENT
from tests.support.recipes import API, LIBRARIES, LIMIT_S

pytestmark = pytest.mark.recipes

BIN = LIBRARIES / "bin"
TSC = LIBRARIES / "node_modules" / "typescript" / "bin" / "tsc"
STRICT = ("--strict", "--noEmit", "--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom,dom.asynciterable")
PROGRAM = (Path(__file__).parent / "sdk.mts").read_text(encoding="utf-8")


@pytest.fixture
def app(tmp_path: Path, cluster: str) -> Path:
    """A folder of somebody's program that uses everything."""
    assert API in PROGRAM
    (tmp_path / "package.json").write_text('{"private": true}')
    (tmp_path / "sdk.mts").write_text(PROGRAM.replace(API, cluster))
    node(tmp_path, BIN / "npm", "install", "--no-audit", "--no-fund", CLIENT)
    return tmp_path


def node(folder: Path, *argv: str | Path) -> str:
    """Run a program of the libraries in a folder and return what it prints."""
    result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_everything_is_typed_and_does_what_it_says(app: Path, story: str) -> None:
    assert node(app, BIN / "node", TSC, *STRICT, "sdk.mts") == ""
    shown = node(app, BIN / "node", "sdk.mts").strip()
    assert len(shown) > 10
    assert story.startswith(shown)
