"""`sluice replay` on a live cluster: exact lengths, and what the cluster tells of itself."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.support.cluster import Cluster, tiny_cluster
from tests.support.processes import sluice

pytestmark = pytest.mark.kernels

NUM_PROBED = 16
"""Tokens of the prompt by which the command finds out that ids are taken."""


def write_trace(path: Path, count: int) -> tuple[int, int]:
    """Write a trace of so many requests within 4 s; return the sums of its lengths."""
    rng = np.random.default_rng(3)
    prompts, answers = rng.integers(5, 90, count), rng.integers(2, 24, count)
    times = np.sort(rng.uniform(0, 4, count)).round(3)
    lines = [f"{at_s},{p},{a},api" for at_s, p, a in zip(times, prompts, answers, strict=True)]
    path.write_text("\n".join(["arrival_s,input_tokens,output_tokens,log_type", *lines, ""]))
    return int(prompts.sum()), int(answers.sum())


def counter(running: Cluster, name: str) -> int:
    """Return one counter of the dispatcher."""
    with urllib.request.urlopen(f"{running.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return sum(int(float(value)) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(240)  # programs start, each of which loads for seconds on a busy machine
def test_a_trace_reaches_a_live_cluster_token_by_token(tmp_path: Path) -> None:
    trace, out = tmp_path / "arrivals.csv", tmp_path / "out.json"
    num_prompt, num_output = write_trace(trace, 40)
    with tiny_cluster() as running:
        flags = ("--url", running.url, "--json", str(out), "--slo", "ttft=60,tpot=60")
        result = sluice("replay", str(trace), *flags)
        assert result.returncode == 0, result.stdout + result.stderr
        assert counter(running, "vllm:prompt_tokens_total") == num_prompt + NUM_PROBED
        assert counter(running, "vllm:generation_tokens_total") == num_output + 1
        assert running.stop() == 0
    comparison = json.loads(out.read_text())
    assert (comparison["scenario"]["model"], comparison["scenario"]["prompts"]) == ("tiny", "token ids")
    found = comparison["systems"]["sluice"]
    assert (found["requests"], found["completed"], found["refused"]) == (40, 40, 0)
    assert found["slo"]["both_share"] == 1.0
    assert 0 <= found["kv_peak_ratio"] <= 1  # looked at twice a second: short answers may pass between
    assert found["demand_over_capacity_peak"] >= found["kv_peak_ratio"]
    assert (found["preemptions"], found["gpus_peak"], found["gpu_seconds"]) == (0, 0, 0.0)
    assert found["bubble_ratio"] is None
    assert 0 < found["ttft_s"]["p50"] < 5
    assert "TTFT p99" in result.stdout
