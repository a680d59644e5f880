"""What common models take: the arithmetic, and the page that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.main import run_command
from cli.model_table import CARDS_GB, fit_of
from shared.model_sizes import CheckpointSizes
from sim.catalog.facts import models

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_what_fits_is_what_parameters_and_workspace_leave() -> None:
    """A card of 8 GB: 7.2 · 10⁹ less 2 · 10⁹ of parameters and 0.3 of workspace, by contexts of 8 192 · 4 000 bytes."""
    sizes = CheckpointSizes("m", 10**9, 10, 2000, 2048, 32_000, 32_768)
    workspace = 4 * 2**20 + 2 * (24 * 2048 * 2048 + 6 * 256 * 32_000)
    fit = fit_of(sizes)
    assert (fit.parameter_bytes, fit.float32_bytes, fit.kv_bytes) == (2 * 10**9, 4 * 10**9, 4_000_000)
    assert fit.least_bytes == 2 * 10**9 + workspace + 8192 * 4000
    assert fit.contexts[8] == (7_200_000_000 - 2 * 10**9 - workspace) // 4000 // 8192
    assert fit.cpu_tokens_per_s == 25.0
    assert fit_of(CheckpointSizes("m", 10**9, 10, 2000, 2048, 32_000, 2048)).context == 2048
    assert set(fit_of(CheckpointSizes("m", 10**12, 10, 2000, 2048, 32_000, 2048)).contexts.values()) == {0}


def test_the_table_of_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["ls", "--sizes"]) == 0
    printed = capsys.readouterr().out
    shown = re.search(r"^```\n\$ sluice ls --sizes\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert shown is not None
    assert shown[1] == printed
    assert run_command(["models", "--sizes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == set(models())
    assert [row["parameter_bytes"] for row in rows] == sorted(row["parameter_bytes"] for row in rows)
    assert all(list(row["contexts"]) == [str(gb) for gb in CARDS_GB] for row in rows)
