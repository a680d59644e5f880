"""Every recipe of docs/recipes.md, as it stands there but for the ports, does what it says. By `make test-recipes`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.chromium import running_chromium
from tests.support.recipes import API, LIBRARIES, MIN_PIECES, recipes, run

pytestmark = pytest.mark.recipes

RECIPES = recipes()
PYTHON, NODE = LIBRARIES / "bin" / "python", LIBRARIES / "bin" / "node"
RUNNING = [
    *(("openai", python, "story.py") for python in (PYTHON, sys.executable)),  # two versions of it
    *((name, PYTHON, "story.py") for name in ("LangChain", "LlamaIndex", "LiteLLM")),
    ("Vercel AI SDK", NODE, "story.mjs"),
]
IN_A_BROWSER, OPEN_WEBUI = "A browser page", "Open WebUI"
TOO_EARLY = "'qoe.ttft_s' must be above 0."


def write(folder: Path, name: str, code: str, cluster: str) -> Path:
    """Write a recipe to a file, with the cluster's address."""
    assert API in code
    (folder / name).write_text(code.replace(API, cluster))
    (folder / "node_modules").symlink_to(LIBRARIES / "node_modules")
    return folder / name


def hurried(code: str) -> str:
    """Return a recipe that asks for the first token before the request."""
    assert code.count("0.5") == 1
    return code.replace("0.5", "-1")


def test_each_recipe_of_the_page_is_run_here() -> None:
    assert {name for name, *_ in RUNNING} | {IN_A_BROWSER, OPEN_WEBUI} == set(RECIPES)
    assert {name: len(blocks) for name, blocks in RECIPES.items() if len(blocks) > 1} == {OPEN_WEBUI: 2}


@pytest.mark.parametrize(("name", "program", "file"), RUNNING)
def test_a_recipe_prints_the_story_piece_by_piece(
    cluster: str, story: str, tmp_path: Path, name: str, program: str, file: str
) -> None:
    (code,) = RECIPES[name]
    pieces, errors = run([program, write(tmp_path, file, code, cluster)], tmp_path)
    assert b"".join(pieces).decode() == story, errors
    assert len(pieces) >= MIN_PIECES


@pytest.mark.parametrize(("name", "program", "file"), RUNNING)
def test_the_reader_s_schedule_in_a_recipe_reaches_the_server(
    cluster: str, tmp_path: Path, name: str, program: str, file: str
) -> None:
    (code,) = RECIPES[name]
    _, errors = run([program, write(tmp_path, file, hurried(code), cluster)], tmp_path)
    assert TOO_EARLY in errors


async def shown(page_url: str, folder: Path, expected: str) -> tuple[str, int]:
    """Open a page in a browser; return what its story says once it is whole, or is another, and in how many pieces."""
    script = """
    while (expected.startsWith(story.textContent) && expected !== story.textContent)
      await new Promise((go_on) => setTimeout(go_on, 20));
    return [story.textContent, [...story.childNodes].filter((node) => node.textContent).length];
    """
    async with running_chromium(folder) as browser, browser.page(page_url) as page:
        text, num_pieces = await page.run(script, expected=expected)
    return text, num_pieces


async def test_a_page_shows_the_story_piece_by_piece(
    cluster: str, story: str, site: tuple[str, Path], tmp_path: Path
) -> None:
    (code,) = RECIPES[IN_A_BROWSER]
    host, folder = site
    (folder / "page.html").write_text(code.replace(API, cluster))
    text, num_pieces = await shown(f"http://{host}/page.html", tmp_path, story)
    assert text == story
    assert num_pieces >= MIN_PIECES


async def test_a_page_shows_why_it_is_refused(cluster: str, site: tuple[str, Path], tmp_path: Path) -> None:
    (code,) = RECIPES[IN_A_BROWSER]
    host, folder = site
    (folder / "refused.html").write_text(hurried(code).replace(API, cluster))
    assert await shown(f"http://{host}/refused.html", tmp_path, TOO_EARLY) == (TOO_EARLY, 1)
