"""Variants of systems: what is changed is changed in the run, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.main import run_command
from shared.errors import StartupError
from shared.systems import SYSTEMS
from sim.experiment.run import run_system
from sim.experiment.setup import build_cluster
from sim.experiment.summary import Summary, summarise
from sim.scenarios.scenario import Scenario, validated
from tests.support.scenarios import SMALL

pytestmark = pytest.mark.slow
QUICK = {"restore_hold_s": 1.0}
"""Groups are restored within a run of seconds."""
SCENARIO: dict[str, Any] = {
    "name": "varied",
    "model": "llama-3-8b",
    "gpu": "a100",
    "instances": 2,
    "lengths": "200x60",
    "duration_s": 20.0,
    "kv_tokens": 2000,
    "max_batch_tokens": 512,
    "arrivals": {"kind": "one-burst", "rate_per_s": 4.0, "factor": 10.0, "burst_start_s": 2, "burst_end_s": 4},
    "variants": {
        "as-it-is": {"system": "kunserve"},
        "quick": {"system": "kunserve", "planner": QUICK},
        "by-benefit": {"system": "kunserve", "planner": {**QUICK, "restore_by": "benefit"}},
        "by-ratio": {"system": "kunserve", "planner": {**QUICK, "restore_by": "ratio"}},
        "stays": {"system": "kunserve", "planner": {**QUICK, "restore_ratio": 0.0}},
        "computes-again": {"system": "kunserve", "exchange": False},
        "by-count": {"system": "kunserve", "scheduler": "chunked"},
        "cuts": {"system": "fcfs", "scheduler": "chunked"},
        "does-not-cut": {"system": "fcfs-chunked", "scheduler": "fcfs"},
        "cuts-by-work": {"system": "fcfs-chunked", "scheduler": "lookahead"},
        "unlimited-fcfs": {"system": "oracle", "scheduler": "fcfs"},
    },
}


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    return validated(SCENARIO, "scenario varied")


@pytest.fixture(scope="module")
def found(scenario: Scenario) -> dict[str, Summary]:
    names = ("fcfs", "fcfs-chunked", "kunserve", "oracle", *scenario.variants)
    runs = {name: run_system(scenario, name, seed=3) for name in names}
    return {name: summarise(run.records, run.facts) for name, run in runs.items()}


def test_a_variant_without_changes_is_its_system(found: dict[str, Summary]) -> None:
    assert found["kunserve"]["drops"] > 0
    assert found["as-it-is"] == found["kunserve"]


def test_another_scheduler_makes_one_system_the_other(found: dict[str, Summary]) -> None:
    """Those two differ in nothing else; and with one stage `lookahead` is `chunked`."""
    assert found["fcfs"] != found["fcfs-chunked"]
    assert found["cuts"] == found["fcfs-chunked"] == found["cuts-by-work"]
    assert found["does-not-cut"] == found["fcfs"]


def test_another_scheduler_leaves_memory_as_it_is(found: dict[str, Summary]) -> None:
    assert found["unlimited-fcfs"]["preemptions"] == 0
    assert found["unlimited-fcfs"]["kv_peak_ratio"] > 1 or found["unlimited-fcfs"]["demand_over_capacity_peak"] > 1
    assert found["unlimited-fcfs"] != found["fcfs"]


def test_what_has_memory_without_end_is_known_by_that_and_not_by_its_name(scenario: Scenario) -> None:
    names = [name for name in (*SYSTEMS, *scenario.variants) if scenario.has_unlimited_memory(name)]
    assert names == ["oracle", "andes-unlimited", "unlimited-fcfs"]


def test_another_scheduler_cuts_otherwise_in_groups(found: dict[str, Summary]) -> None:
    assert found["by-count"]["drops"] > 0
    assert found["by-count"]["bubble_ratio"] > found["kunserve"]["bubble_ratio"] > 0


def test_host_memory_makes_one_system_the_other_and_its_size_and_link_are_the_variants() -> None:
    """Turns make rows give way all the time, so with somewhere to go the run is another one."""
    turns = {"system": "round-robin", "host_memory": "64GiB"}
    variants = {
        "none": {**turns, "host_memory": 0},
        "as-swap": turns,
        "swap-in-turns": {"system": "swap", "scheduler": "round-robin"},
        "swap-without": {"system": "swap", "scheduler": "round-robin", "host_memory": 0},
        "small": {**turns, "host_memory": "64MiB", "host_link_gb_per_s": 4},
        "slow": {**turns, "host_link_gb_per_s": 0.001},
    }
    scenario = validated({**SCENARIO, "variants": variants, "duration_s": 8.0}, "scenario varied")
    runs = {name: run_system(scenario, name, seed=3) for name in ("round-robin", *variants)}
    found = {name: summarise(run.records, run.facts) for name, run in runs.items()}
    assert found["as-swap"] == found["swap-in-turns"]
    assert found["none"] == found["swap-without"] == found["round-robin"]
    assert found["slow"]["swapped_out_bytes"] == 0, "to compute again is quicker"
    assert found["as-swap"]["preemptions"] > 0
    assert found["none"]["recomputed_tokens"] > found["as-swap"]["recomputed_tokens"]
    assert found["as-swap"]["brought_back_tokens"] > found["none"]["brought_back_tokens"] == 0
    assert found["as-swap"]["swapped_out_bytes"] > found["none"]["swapped_out_bytes"] == 0
    for name, other in (("as-swap", "none"), ("small", "none"), ("small", "as-swap")):
        assert found[name]["ttft_s"] != found[other]["ttft_s"], (name, other)
    worker = build_cluster(scenario, "small", scenario.workload(3)).params.workers[0]
    host = worker.host_memory()
    assert host is not None
    assert host.num_blocks * host.block_kv_bytes == 64 * 2**20
    assert host.block_copy_s == host.block_kv_bytes / 4e9
    slower = {**turns, "host_link_gb_per_s": None}
    as_catalogued = validated({**SCENARIO, "variants": {"plain": slower}}, "scenario varied")
    plain = build_cluster(as_catalogued, "plain", as_catalogued.workload(3)).params.workers[0]
    assert plain.host_link_bytes_per_s == as_catalogued.instance().host_link_bytes_per_s


def test_settings_of_a_policy_change_what_it_does_and_those_that_it_has_change_nothing() -> None:
    variants = {
        "short": {"system": "round-robin", "policy": {"quantum_tokens": 5}},
        "as-it-is": {"system": "round-robin", "policy": {"quantum_tokens": 50}},
        "by-gain": {"system": "andes", "policy": {"weighing": "gain"}},
    }
    scenario = validated({**SCENARIO, "variants": variants, "duration_s": 8.0}, "scenario varied")
    runs = {name: run_system(scenario, name, seed=3) for name in ("round-robin", "andes", "lqsf", *variants)}
    told = {name: summarise(run.records, run.facts) for name, run in runs.items()}
    assert told["as-it-is"] == told["round-robin"] != told["short"]
    assert told["by-gain"] == told["lqsf"] != told["andes"]


def test_without_restore_groups_stay(found: dict[str, Summary]) -> None:
    assert found["quick"]["restores"] > 0
    assert found["stays"]["drops"] > 0
    assert found["stays"]["restores"] == 0


def test_groups_are_restored_by_the_rule_that_is_named(found: dict[str, Summary]) -> None:
    """Time in groups tells both from those that stay, and one from the other: here a restore is dear."""
    for rule in ("by-benefit", "by-ratio"):
        assert found[rule]["drops"] == found[rule]["restores"] > 0
        assert 0 < found[rule]["grouped_ratio"] < found["stays"]["grouped_ratio"]
        assert found[rule]["completed"] == found["stays"]["completed"]
    assert found["by-ratio"] == found["quick"], "the papers' rule is the default"
    assert found["by-benefit"]["grouped_ratio"] > found["by-ratio"]["grouped_ratio"]
    assert found["fcfs"]["grouped_ratio"] == 0


def test_without_exchange_kv_is_computed_again(scenario: Scenario, found: dict[str, Summary]) -> None:
    assert found["computes-again"]["drops"] > 0
    assert found["computes-again"]["completed"] == found["kunserve"]["completed"] > 100
    assert found["computes-again"]["ttft_s"] != found["kunserve"]["ttft_s"]
    workload = scenario.workload(3)
    for name, exchanges in (("kunserve", True), ("computes-again", False)):
        elastic = build_cluster(scenario, name, workload).params.workers[0].elastic
        assert elastic is not None
        assert (elastic.link_bytes_per_s > 0) == exchanges


@pytest.mark.long
def test_over_a_slow_link_live_exchange_stalls_less() -> None:
    """Contexts of more than a split: of shorter ones there is nothing to attend elsewhere."""
    by_price = {"system": "kunserve", "network_bytes_per_s": 1e9}
    slow = {**by_price, "kv_exchange": "coordinated"}
    variants = {"slow": slow, "live": {**slow, "kv_exchange": "live"}, "by-price": by_price}
    more = {"lengths": "700x60", "kv_tokens": 7000, "variants": variants}
    scenario = validated({**SCENARIO, **more}, "scenario varied")
    params = build_cluster(scenario, "slow", scenario.workload(3)).params
    assert params.link is not None
    assert params.link.bytes_per_s == 1e9
    assert params.workers[0].elastic is not None
    assert params.workers[0].elastic.link_bytes_per_s == 1e9
    runs = {name: run_system(scenario, name, seed=3) for name in ("kunserve", *variants)}
    found = {name: summarise(run.records, run.facts) for name, run in runs.items()}
    assert min(each["drops"] for each in found.values()) > 0
    assert found["slow"]["stall_s"]["max"] > found["kunserve"]["stall_s"]["max"]
    assert found["live"]["stall_s"]["max"] < found["slow"]["stall_s"]["max"]
    assert found["by-price"]["stall_s"] == found["live"]["stall_s"], "over this link that is the cheaper mode"


@pytest.mark.long
def test_one_seed_is_one_result(scenario: Scenario, found: dict[str, Summary]) -> None:
    for name in ("stays", "computes-again"):
        again = run_system(scenario, name, seed=3)
        assert summarise(again.records, again.facts) == found[name]


NO_EXCHANGE = "fcfs exchanges no KV; leave `exchange` and `kv_exchange` out"


@pytest.mark.parametrize(
    ("system", "changes", "message"),
    [
        ("kunserv", {}, "unknown system 'kunserv'; did you mean 'kunserve'?"),
        ("kunserve", {"scheduler": "lokahead"}, "no scheduler is called 'lokahead'; there are: fcfs, chunked"),
        ("oracle", {"host_memory": "1GiB"}, "oracle keeps no KV on the host; leave `host_memory` out"),
        ("oracle", {"host_memory": 1}, "oracle keeps no KV on the host"),
        ("swap", {"host_memory": "much"}, "variants.x.host_memory: 'much' is not a size"),
        ("swap", {"host_link_gb_per_s": 0}, "host_link_gb_per_s: Input should be greater than 0"),
        ("andes", {"policy": {"horizon": 3}}, "policy.horizon: Extra inputs are not permitted"),
        ("andes", {"policy": {"keeps": 0.5}}, "policy.keeps: Input should be greater than or equal to 1"),
        ("fcfs", {"policy": {"horizon_s": 3}}, "policy: the scheduler 'fcfs' does not take horizon_s"),
        ("round-robin", {"policy": {"quantum_tokens": 0}}, "a quantum is at least one token"),
        (
            "round-robin",
            {"policy": {"quantum_tokens": "few"}},
            "'round-robin' does not take quantum_tokens",
        ),
        ("fcfs", {"exchange": False}, NO_EXCHANGE),
        ("fcfs", {"kv_exchange": "live"}, NO_EXCHANGE),
        ("kunserve", {"kv_exchange": "lively"}, "variants.x.kv_exchange: "),
        ("kunserve", {"exchnge": False}, "variants.x.exchnge: there is no such field"),
        ("kunserve", {"planner": {"restore_rato": 0}}, "'restore_rato' that a variant may change. Did you mean"),
        ("kunserve", {"planner": {"restore_ratio": 2}}, "restore_ratio: Input should be less than or equal to 1"),
        ("kunserve", {"planner": {"system": "fcfs"}}, "the planner has no setting 'system' that a variant may"),
        ("kunserve", {"planner": {"nats_url": "x"}}, "no setting 'nats_url' that a variant may change"),
        ("kunserve", {"planner": {"drop_strategy": "best"}}, "drop_strategy: Input should be 'throughput-greedy'"),
    ],
)
def test_what_is_wrong_with_a_variant_is_said(system: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        validated({**SCENARIO, "variants": {"x": {"system": system, **changes}}}, "scenario varied")
    assert "scenario varied: variants.x" in str(caught.value)
    assert message in str(caught.value)


def test_a_variant_has_a_name_of_its_own() -> None:
    with pytest.raises(StartupError, match="a system has this name; give the variant another one"):
        validated({**SCENARIO, "variants": {"kunserve": {"system": "kunserve"}}}, "scenario varied")


def test_a_name_that_is_neither_a_system_nor_a_variant_is_refused(scenario: Scenario) -> None:
    listed = "as-it-is, quick, by-benefit, by-ratio, stays"
    with pytest.raises(StartupError, match=f"unknown system 'stay'.*The scenario's variants are {listed}"):
        scenario.variant("stay")


def test_variants_are_compared_like_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "mine.toml", tmp_path / "out.json"
    path.write_text(f'{SMALL}\n[variants.cuts]\nsystem = "fcfs"\nscheduler = "chunked"\n')
    flags = ("--scenario", str(path), "--duration", "3", "--jobs", "2", "--quiet", "--json", str(out))
    assert run_command(["compare", "--systems", "fcfs,cuts,fcfs-chunked", *flags]) == 0
    tree = json.loads(out.read_text())
    assert list(tree["systems"]) == ["fcfs", "cuts", "fcfs-chunked"]
    assert tree["systems"]["cuts"] == tree["systems"]["fcfs-chunked"] != tree["systems"]["fcfs"]
    assert tree["scenario"]["variants"] == {"cuts": {"system": "fcfs", "scheduler": "chunked"}}
    assert run_command(["plan", "--system", "cuts", *flags[:-2], "--slo", "ttft=0.3,tpot=0.05,share=0.5"]) == 0
    assert "cuts" in capsys.readouterr().out
    assert run_command(["compare", "--systems", "fcfs,cut", *flags]) == 2
    assert "The scenario's variants are cuts" in capsys.readouterr().err
