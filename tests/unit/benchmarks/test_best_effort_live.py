"""What the benchmark of readers beside a batch says of its phases."""

from __future__ import annotations

import json

import pytest

from benchmarks.best_effort_live import ALONE, BATCH, BOTH, OUTPUT, PROMPT, Phase, documents, report
from benchmarks.qoe_live import TARGET, Reading
from cli.bench.server import BenchServer


def reading(stall_s: float) -> Reading:
    """A reader whose second token is so late that the screen stands still for `stall_s`; the first comes in time."""
    return Reading(0.0, [TARGET.ttft_s, TARGET.ttft_s + 1 / TARGET.speed_tokens_per_s + stall_s])


def phase(title: str, tokens_per_s: float, *stalls_s: float) -> Phase:
    return Phase("andes", title, [reading(each) for each in stalls_s], tokens_per_s, 7, 60.0, 3, 0.25)


@pytest.mark.parametrize(
    ("stall_s", "tokens_per_s", "verdict"),
    [
        (0.9, 60.0, "longest stall 0.90 s (at most 1), batch 60% of alone (at least 50%): reached"),
        (1.1, 60.0, "longest stall 1.10 s (at most 1), batch 60% of alone (at least 50%): missed"),
        (0.0, 40.0, "longest stall 0.00 s (at most 1), batch 40% of alone (at least 50%): missed"),
    ],
)
def test_the_worst_stall_on_any_screen_and_the_batchs_share_decide(
    capsys: pytest.CaptureFixture[str], stall_s: float, tokens_per_s: float, verdict: str
) -> None:
    """Two turns: the worst reader of either, and of the batch the median of 100 − 10 and 100 + 10 tokens/s alone."""
    phases = [
        *(phase(ALONE, 0.0, 0.0, 0.0), phase(BOTH, tokens_per_s, 0.0, stall_s), phase(BATCH, 90.0)),
        *(phase(ALONE, 0.0, 0.0, 0.0), phase(BOTH, tokens_per_s, 0.0, 0.0), phase(BATCH, 110.0)),
    ]
    report(phases, 1.0)
    said = capsys.readouterr().out
    assert f"andes: {verdict}" in said
    assert f"| andes | {BOTH} |" in said
    assert f"{int(stall_s > 1)} of 4" in said


def test_the_batch_asks_the_same_of_every_system_and_every_document_is_another() -> None:
    server = BenchServer("http://here", "medium", "completions", owner="sluice")
    bodies = [json.loads(documents(server, 7)(number)) for number in range(20)]
    assert bodies == [json.loads(documents(server, 7)(number)) for number in range(20)]
    assert len({tuple(body["prompt"]) for body in bodies}) == 20
    for body in bodies:
        assert body["service_tier"] == "flex"
        assert PROMPT[0] <= len(body["prompt"]) <= PROMPT[1]
        assert OUTPUT[0] <= body["max_tokens"] <= OUTPUT[1]
    assert "service_tier" not in json.loads(documents(BenchServer("http://x", "m", "completions"), 7)(0))
