"""What pages promise that a machine can see: files are named, links lead somewhere, and lines can be read."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "client" / "README.md"])
OF_TODAY = [page for page in PAGES if page.parent.name not in ("results", "decisions") and page.name != "CHANGELOG.md"]
MAX_WIDTH = 120
FOLDERS = {
    "cli": "cli",
    "client": "client/sluice_client",
    "dispatcher": "services/dispatcher",
    "monitor": "services/monitor",
    "packing": "services/planner/policy/packing",
    "planner": "services/planner",
    "worker": "services/worker",
    "engine": "services/worker/engine sequences blocks scheduling contract",
    "executor": "services/worker/executor sampling models attention fused native modelled",
    "elastic-memory": "services/worker/memory",
    "groups": "services/worker/roles kv_moves pages pipeline peers",
    "migration": "services/worker/migration",
    "bus": "shared",
    "simulation": "sim",
    "scenarios": "sim/experiment scenarios workload catalog",
    "tools": "tools",
}
PAGE_OF = {
    str((ROOT / folder.split()[0]).parent.relative_to(ROOT) / name.rpartition("/")[2]): page
    for page, folder in FOLDERS.items()
    for name in folder.split()
}
"""The page in docs/design that names the files of a folder and of those below it; the longest one counts."""


def page_of(folder: str) -> str:
    return PAGE_OF[max((each for each in PAGE_OF if f"{folder}/".startswith(f"{each}/")), key=len)]


def files_by_folder() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for top in ("cli", "client/sluice_client", "services", "shared", "sim", "tools"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.name != "__init__.py":
                found.setdefault(str(path.parent.relative_to(ROOT)), []).append(path.name)
    return found


@pytest.mark.parametrize(("folder", "names"), files_by_folder().items())
def test_every_file_is_named_in_its_page(folder: str, names: list[str]) -> None:
    page = (ROOT / "docs" / "design" / f"{page_of(folder)}.md").read_text()
    files = page[page.index("\n## Files") :]
    named = re.findall(r"[\w*]+\.py", files)
    assert [name for name in names if not any(fnmatch(name, each) for each in named)] == []


@pytest.mark.parametrize("folder", files_by_folder())
def test_every_package_is_named_in_its_page(folder: str) -> None:
    page = (ROOT / "docs" / "design" / f"{page_of(folder)}.md").read_text()
    assert f"{folder.rpartition('/')[2]}/" in page[page.index("\n## Files") :]


@pytest.mark.parametrize("page", OF_TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_file_that_is_gone(page: Path) -> None:
    """A path may begin anywhere below the root."""
    known = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[a-z]*/**/*.py")]
    named = set(re.findall(r"[\w*/]+\.py\b", page.read_text()))
    assert [each for each in named if not any(fnmatch(path, f"*/{each.lstrip('/')}") for path in known)] == []


def prose_of(page: Path) -> str:
    """Return a page without what is printed or pasted: fenced blocks, and indented commands."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_not_too_wide(page: Path) -> None:
    """A row of a table is one line, however long it is."""
    lines = [line for line in prose_of(page).splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > MAX_WIDTH] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert "://" in target or there.exists(), target
        assert "://" in target or not anchor or anchor in anchors_of(there.read_text()), target


def anchors_of(text: str) -> set[str]:
    """Return what may be linked to in a page: its headings as GitHub writes them, and anchors of its own."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))
