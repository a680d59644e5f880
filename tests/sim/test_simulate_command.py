"""`sluice simulate`, `compare` and `plan`, from the flags to the files."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.main import run_command
from shared.systems import DEFAULT_SYSTEM
from tests.support.scenarios import small_scenario
from tests.unit.sim.test_experiment_compare import FIXED_KEYS


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    return str(small_scenario(tmp_path))


def run(*argv: str) -> int:
    return run_command([*argv, "--quiet"])


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line with which a command is refused."""
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def written(out: Path, *argv: str) -> dict[str, Any]:
    """Return what a command writes to a file."""
    assert run(*argv, "--json", str(out)) == 0
    tree: dict[str, Any] = json.loads(out.read_text())
    return tree


def compared(scenario: str, out: Path, *flags: str) -> dict[str, Any]:
    return written(out, "compare", "--scenario", scenario, *flags)


@pytest.mark.slow
def test_a_comparison_is_a_table_and_a_file(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = compared(scenario, tmp_path / "out.json", "--jobs", "1")
    assert list(tree["systems"]) == ["fcfs", "fcfs-chunked"]
    for summary in tree["systems"].values():
        assert list(summary) == FIXED_KEYS
        assert summary["completed"] == summary["requests"] == tree["scenario"]["num_requests"][0] > 50
        assert summary["gpu_seconds"] > 2 * 6
        assert summary["slo"]["both_share"] < 1
    assert tree["systems"]["fcfs"]["tpot_s"] != tree["systems"]["fcfs-chunked"]["tpot_s"]
    assert tree["gap_closed"]["fcfs"] == {"ttft_p99": None, "qoe_mean": None, "qoe_share_ge_0_95": None}
    assert tree["systems"]["fcfs"]["qoe"]["mean"] < tree["alone"]["qoe_mean"] <= 1
    out = capsys.readouterr().out
    assert "small: llama-3-8b on 2 × a100" in out
    assert "TTFT p99" in out
    assert "each request alone on an instance: QoE mean" in out


@pytest.mark.slow
def test_the_same_seeds_give_the_same_bytes_in_any_process_and_with_any_number_of_jobs(
    scenario: str, tmp_path: Path
) -> None:
    """In processes that hash differently, with one job at a time and with three."""
    texts = []
    for hash_seed, jobs in (("1", "1"), ("4242", "3")):
        out = tmp_path / f"{jobs}.json"
        what = ("--systems", "fcfs,swap,round-robin,oracle", "--duration", "4", "--seed", "3", "--seed", "4")
        flags = ("--scenario", scenario, *what, "--jobs", jobs, "--json", str(out))
        subprocess.run(
            [sys.executable, "-m", "cli.main", "compare", *flags],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        )
        texts.append(out.read_bytes())
    assert texts[0] == texts[1]
    tree = json.loads(texts[0])
    assert tree["seeds"] == [3, 4]
    assert tree["per_seed"]["3"] != tree["per_seed"]["4"]
    assert len({json.dumps(summary) for summary in tree["systems"].values()}) == 4
    assert tree["systems"]["swap"]["preemptions"] > 0


def test_the_best_median_is_that_of_a_system_whose_memory_has_an_end(scenario: str, tmp_path: Path) -> None:
    tree = compared(scenario, tmp_path / "out.json", "--systems", "fcfs,andes-unlimited", "--duration", "3")
    medians = {name: summary["ttft_s"]["p50"] for name, summary in tree["systems"].items()}
    assert medians["andes-unlimited"] < medians["fcfs"] == tree["slo_scales"]["ttft_s"]["unit_s"]


def test_another_seed_draws_another_load(scenario: str, tmp_path: Path) -> None:
    flags = ("--systems", "fcfs", "--duration", "2")
    one, two = (compared(scenario, tmp_path / f"{seed}.json", "--seed", seed, *flags) for seed in ("1", "2"))
    assert one["systems"] != two["systems"]


@pytest.mark.slow
def test_simulate_is_a_comparison_of_one(scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = compared(scenario, tmp_path / "both.json", "--jobs", "1", "--duration", "2")
    capsys.readouterr()
    flags = ("--scenario", scenario, "--duration", "2")
    one = written(tmp_path / "one.json", "simulate", "--system", "fcfs-chunked", *flags)
    assert one["systems"] == {"fcfs-chunked": both["systems"]["fcfs-chunked"]}
    assert "×0" not in capsys.readouterr().out


def test_flags_change_the_scenario(scenario: str, tmp_path: Path) -> None:
    flags = ("--gpu", "h100", "--model", "qwen2.5-14b", "--instances", "3", "--era-ms", "2", "--kv-tokens", "5008")
    more = (
        "--max-batch-tokens",
        "300",
        "--max-batch-rows",
        "20",
        "--thinking",
        "share=0.5,tokens=30",
        "--reader",
        "ttft=2,speed=10",
        "--slo",
        "ttft=3,tpot=1",
    )
    tree = compared(scenario, tmp_path / "out.json", "--systems", "fcfs", "--duration", "1", *flags, *more)
    told = tree["scenario"]
    assert (told["model"], told["gpu"], told["instances"], told["kv_tokens"]) == ("qwen2.5-14b", "h100", 3, 5008)
    assert told["step_ms"]["era"] == 2
    assert told["step_ms"]["g0"] == 11.34
    assert (told["max_batch_tokens"], told["max_batch_rows"]) == (300, 20)
    assert (told["reader"]["ttft_s"], told["reader"]["speed"]) == (2, 10)
    assert (told["thinking"]["share"], told["thinking"]["tokens"]) == (0.5, 30)
    assert tree["systems"]["fcfs"]["slo"]["ttft_s"] == 3
    assert tree["systems"]["fcfs"]["gpus_peak"] == 3


def test_a_trace_is_run_with_its_own_times_and_lengths(scenario: str, tmp_path: Path) -> None:
    trace = tmp_path / "three.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0.0,100,5\n0.25,50,7\n1.5,20,9\n")
    out = tmp_path / "out.json"
    tree = written(out, "simulate", "--trace", str(trace), "--instances", "1")
    assert tree["scenario"]["name"] == "three"
    assert tree["systems"][DEFAULT_SYSTEM]["requests"] == 3
    tree = written(out, "simulate", "--trace", str(trace), "--upscale", "4")
    assert tree["systems"][DEFAULT_SYSTEM]["requests"] == 12


def test_the_load_of_another_scenario_comes_with_its_readers_to_the_same_cluster(scenario: str, tmp_path: Path) -> None:
    flags = ("--systems", "fcfs", "--workload", "burst-demo", "--duration", "1", "--warm-up", "0")
    told = compared(scenario, tmp_path / "out.json", *flags)["scenario"]
    assert told["name"] == "small under burst-demo"
    assert (told["model"], told["instances"]) == ("llama-3-8b", 2)
    assert "burstgpt-conversation" in told["workload"]


@pytest.mark.slow
def test_a_drawn_load_can_be_made_denser(scenario: str, tmp_path: Path) -> None:
    flags = ("--systems", "fcfs", "--duration", "2")
    sizes = []
    for more in (("--rate", "2"), ("--rate", "20"), ("--rate", "20", "--upscale", "2")):
        sizes += compared(scenario, tmp_path / "out.json", *flags, *more)["scenario"]["num_requests"]
    assert sizes[0] < 0.3 * sizes[1]
    assert 1.4 * sizes[1] < sizes[2] < 2.8 * sizes[1]


@pytest.mark.slow
def test_a_plan_says_how_many_instances_are_enough(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    flags = ("--scenario", scenario, "--slo", "ttft=0.3,tpot=0.05,share=0.95", "--duration", "3")
    tree = written(out, "plan", *flags)
    count = tree["instances"]
    assert count > 1
    assert tree["share"] >= 0.95 > tree["share_with_one_less"]
    assert tree["tried"][str(count)] == tree["share"]
    assert f"{count} instances suffice" in capsys.readouterr().out

    simulated = written(out, "simulate", *flags, "--instances", "auto")
    assert simulated["scenario"]["instances"] == count
    assert simulated["systems"][DEFAULT_SYSTEM]["slo"]["both_share"] == tree["share"]


def test_a_plan_that_cannot_be_kept_says_so(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--scenario", scenario, "--slo", "ttft=0.001,tpot=0.001", "--duration", "1", "--max-instances", "2")
    assert run("plan", *flags) == 1
    captured = capsys.readouterr()
    assert "not enough with 2 instances" in captured.out
    assert "2 instances do not suffice" in captured.err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an optional extra")
def test_figures_are_drawn_and_the_same_each_time(scenario: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        flags = ("--scenario", scenario, "--duration", "3", "--jobs", "1", "--plot", str(folder))
        assert run("compare", *flags) == 0
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(f"{name}.{ending}" for name in ("timeline", "latency", "cdf") for ending in ("png", "svg"))
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
        assert len((folders[0] / name).read_bytes()) > 5_000
    assert "fcfs-chunked" in (folders[0] / "timeline.svg").read_text()


def test_without_matplotlib_figures_are_refused_before_anything_runs(
    scenario: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = fails(capsys, "compare", "--scenario", scenario, "--plot", str(tmp_path / "figures"))
    assert "matplotlib" in message
    assert "pip install matplotlib" in message
    assert not (tmp_path / "figures").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--systems", "fcsf"), ("unknown system 'fcsf'", "did you mean 'fcfs'?")),
        (("--systems", "fcfs,meld"), ("mell",)),
        (("--systems", ","), ("names no system",)),
        (("--scenario", "burst-dem"), ("burst-demo",)),
        (("--model", "qwen2.5-14"), ("qwen2.5-14b",)),
        (("--gpu", "a80"), ("a800",)),
        (("--lengths", "burstgtp"), ("burstgpt",)),
        (("--seed", "-1"), ("--seed",)),
        (("--instances", "0"), ("--instances",)),
        (("--instances", "many"), ("--instances",)),
        (("--upscale", "0"), ("--upscale",)),
        (("--slo", "ttft=1"), ("tpot=NUMBER is missing",)),
        (("--slo", "ttft=1,tpot=0.1,shape=1"), ("'shape=1' is not one of",)),
        (("--slo", "ttft=1,tpot=0.1,share=2"), ("share is a number up to 1",)),
        (("--reader", "ttft=nan,speed=1"), ("nan",)),
        (("--thinking", "share=1.5,tokens=9"), ("share is a number up to 1",)),
        (("--thinking", "share=0.5,tokens=1"), ("--thinking: tokens", "share=0.5,tokens=400")),
        (("--trace", "no-such.csv"), ("no-such.csv",)),
        (("--trace", __file__, "--rate", "3"), ("--trace", "--rate", "Give one of them")),
        (("--trace", __file__), ("test_simulate_command.py",)),
        (("--scenario", "kunserve-v2", "--rate", "3"), ("--upscale",)),
        (("--scenario", "kunserve-v2"), ("burstgpt_640s.csv", "--traces")),
        (("--json", "/no/such/folder/out.json"), ("/no/such/folder",)),
    ],
)
def test_what_does_not_exist_is_refused_in_one_line_with_what_is_near(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    message = fails(capsys, "compare", *flags)
    for word in words:
        assert word in message


def test_an_automatic_number_of_instances_needs_an_slo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = small_scenario(tmp_path)
    path.write_text(path.read_text().partition("[slo]")[0])
    assert "--slo" in fails(capsys, "simulate", "--scenario", str(path), "--instances", "auto")
    assert "--slo" in fails(capsys, "plan", "--scenario", str(path))


@pytest.mark.slow
def test_a_run_that_dies_is_told_and_the_others_end(
    scenario: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that cannot even unpickle its job ends without a word."""
    monkeypatch.setattr("cli.simulate.jobs._child", _dies)
    assert run("compare", "--scenario", scenario, "--jobs", "2") == 1
    assert "its process ended with 7" in capsys.readouterr().err


def _dies(*_: object) -> None:
    os._exit(7)
