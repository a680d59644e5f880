"""Circles of imports are found whatever the form of the import, and shown with their lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.import_circles import main

LAZY = "def f() -> None:\n    from {package} import first\n"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {package}.first import f\n"


def make_package(folder: Path, package: str, modules: dict[str, str]) -> None:
    (folder / package).mkdir()
    for name, text in {"__init__": "", **modules}.items():
        (folder / package / f"{name}.py").write_text(text.format(package=package))


@pytest.mark.parametrize(("package", "back"), [("ring_lazy", LAZY), ("ring_types", TYPES)])
def test_a_circle_is_shown_with_the_lines_that_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, back: str
) -> None:
    """Lines: first -> second -> third -> first; apart only looks into the circle, so it is no part of it."""
    modules = {"first": "import {package}.second", "second": "\nfrom {package}.third import f", "third": back}
    make_package(tmp_path, package, {**modules, "apart": "import {package}.first"})
    monkeypatch.syspath_prepend(tmp_path)

    assert main([package]) == 1

    out = capsys.readouterr().out
    assert "circle of 3 modules:" in out
    assert f"{package}.second:2: from {package}.third import f" in out
    assert f"  {package}.third:" in out
    assert "apart" not in out


def test_modules_that_import_one_way_are_no_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_package(tmp_path, "no_ring", {"first": "import {package}.second", "second": "", "third": TYPES})
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["no_ring"]) == 0
