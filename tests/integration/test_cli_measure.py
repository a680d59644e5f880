"""`sluice bench` and `sluice profile` on a live cluster."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shared.cost import load_profile
from tests.support.cluster import tiny_cluster
from tests.support.processes import sluice, wait_until

pytestmark = pytest.mark.kernels


@pytest.mark.slow
@pytest.mark.timeout(240)  # three programs start, each of which loads for seconds on a busy machine
def test_a_live_cluster_is_loaded_and_profiled(tmp_path: Path) -> None:
    figures, profile, costs = tmp_path / "figures.json", tmp_path / "mine.toml", tmp_path / "costs"
    with tiny_cluster("--costs-kept", str(costs)) as running:
        load = ("--num-prompts", "8", "--request-rate", "40", "--input-len", "90", "--output-len", "12")
        result = sluice("bench", "--url", running.url, *load, "--json", str(figures))
        assert result.returncode == 0, result.stdout + result.stderr
        summary = json.loads(figures.read_text())["summary"]
        assert (summary["num_complete"], summary["num_output_tokens"]) == (8, 96)
        assert abs(summary["num_input_tokens"] / 8 - 90) < 15, "words are about as long as asked"
        assert 0 < summary["ttft_s"]["p50"] < summary["e2e_s"]["p50"]

        shapes = ("--nats-url", running.nats_url, "--max-batch", "8", "--num-decodes", "6", "--out", str(profile))
        result = sluice("profile", *shapes)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "error on the" in result.stdout
        assert re.search(r"own model on these \d+ steps: before them .*; after them median .*%", result.stdout)
        found = load_profile(profile)
        assert (found.model, found.tp) == ("tiny", 1)
        assert found.cost.step_s(64, 64 * 100, 0) >= found.cost.step_s(1, 100, 0) > 0
        wait_until(lambda: bool(list(costs.glob("*.json"))), "what steps have cost is kept for the next start", 30)
        assert running.stop() == 0
