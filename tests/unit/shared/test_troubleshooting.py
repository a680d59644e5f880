"""Each error has its section in `docs/troubleshooting.md`, and each section its error."""

from __future__ import annotations

import tomllib

from shared.troubleshooting import PAGE, cut, sections
from tests.support.error_names import codes, topics

MAX_LINES = 8
ROOT = PAGE.parents[1]


def test_each_code_and_topic_has_a_section_and_each_section_one_of_them() -> None:
    assert codes() & topics() == set(), "one name for one thing"
    assert {"queue_full", "decimal_below_min_value", "foreign_host"} <= codes(), "they are found at all"
    assert {"port_taken", "keeps_ending"} <= topics()
    assert set(sections()) == codes() | topics()


def test_sections_are_short() -> None:
    for name, text in sections().items():
        assert 1 <= len(text.splitlines()) - 2 <= MAX_LINES, name


def test_a_page_is_cut_at_its_headings() -> None:
    page = "# Page\n\nIntro.\n\n## Part\n\n### one\n### two\n\nBoth.\n\nMore.\n\n### three\n\nThree.\n\n## Z\n\nEnd.\n"
    assert cut(page) == {
        "one": "# one\n\nBoth.\n\nMore.\n",
        "two": "# two\n\nBoth.\n\nMore.\n",
        "three": "# three\n\nThree.\n",
    }


def test_the_page_goes_where_the_code_goes() -> None:
    """Into an installation and the images; of ignored files Docker has it all the same."""
    place = str(PAGE.relative_to(ROOT))
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert PAGE.parent.name in tool["packages"]["find"]["include"]
    assert tool["package-data"][PAGE.parent.name] == [PAGE.name]
    assert f"COPY {place} ./docs/\n" in (ROOT / "docker" / "Dockerfile").read_text()
    assert f"!{place}" in (ROOT / ".dockerignore").read_text().splitlines()
