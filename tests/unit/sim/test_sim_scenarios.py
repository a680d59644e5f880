from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shared.api_keys import Tier
from shared.errors import StartupError
from shared.systems import SYSTEMS
from shared.types import LatencyLimits
from sim.scenarios.files import load_scenario, scenario_names
from sim.scenarios.parts import SloSpec, ThinkingLoad
from sim.scenarios.scenario import Scenario, validated
from sim.workload.workload import Workload
from tests.support.sim_traces import TRACES, write_trace
from tests.support.traces import outputs_of

SMALL: dict[str, Any] = {
    "name": "small",
    "model": "llama-3-8b",
    "gpu": "h200",
    "instances": 1,
    "lengths": "lmsys",
    "duration_s": 300.0,
    "arrivals": {"kind": "poisson", "rate_per_s": 3.0},
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stand-ins for the traces that scenarios name, as dense as the real ones."""
    folder = tmp_path_factory.mktemp("traces")
    write_trace(folder / "burstgpt_640s.csv", duration_s=640, num_requests=158)
    write_trace(folder / "burstgpt_1h.csv", duration_s=3600, num_requests=525)
    write_trace(folder / "azure_conv_1h.csv", duration_s=2860, num_requests=16_309, is_whole=False)
    return folder


def _columns(workload: Workload) -> list[bytes]:
    names = ("arrival_s", "num_prompt", "num_output", "num_thinking", "qoe_ttft_s", "qoe_speed", "tier")
    return [getattr(workload, name).tobytes() for name in names]


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_that_ships_is_whole(name: str, traces: Path) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.title
    assert scenario.left_open
    assert scenario.systems[-1] == "oracle"
    assert set(scenario.systems) <= {*SYSTEMS, *scenario.variants}
    assert set(scenario.variants) <= set(scenario.systems)
    assert scenario.paper or name == "burst-demo"
    workload = scenario.workload(7, traces)
    instance = scenario.instance()
    assert instance.cost.era_s == scenario.era_ms / 1000
    assert len(workload) > 500
    assert np.all(np.diff(workload.arrival_s) >= 0)
    assert workload.arrival_s[0] >= 0
    assert scenario.duration_s is not None
    assert 0.9 * scenario.duration_s < workload.arrival_s[-1] < scenario.duration_s
    total = workload.num_prompt + workload.num_output
    assert total.max() <= min(scenario.max_request_tokens, instance.kv_tokens)
    assert scenario.max_request_tokens <= instance.kv_tokens


@pytest.mark.parametrize("name", scenario_names())
def test_one_seed_is_one_workload(name: str, traces: Path) -> None:
    first, again, other = (load_scenario(name).workload(seed, traces) for seed in (1, 1, 2))
    assert _columns(first) == _columns(again)
    assert first.num_prompt.tobytes() != other.num_prompt.tobytes()
    assert first.arrival_s.tobytes() != other.arrival_s.tobytes()


@pytest.mark.slow
def test_a_workload_does_not_depend_on_the_process() -> None:
    program = (
        "from sim.scenarios.files import load_scenario; import hashlib; w = load_scenario('bros-13b').workload(3);"
        "print(hashlib.sha256(b''.join(c.tobytes() for c in (w.arrival_s, w.num_prompt, w.qoe_speed))).hexdigest())"
    )
    assert len(outputs_of(program)) == 1


def test_other_lengths_leave_arrivals_and_readers_alone() -> None:
    scenario = load_scenario("andes-cyclic")
    first, other = scenario.workload(3), scenario.with_overrides(lengths="arxiv").workload(3)
    assert first.arrival_s.tobytes() == other.arrival_s.tobytes()
    assert first.qoe_speed.tobytes() == other.qoe_speed.tobytes()
    assert first.num_prompt.tobytes() != other.num_prompt.tobytes()


def test_a_factor_multiplies_a_drawn_load() -> None:
    """900 requests expected, then 2 250; five deviations of a Poisson count are 150 and 237."""
    scenario = validated(SMALL, "small")
    assert abs(len(scenario.workload(3)) - 900) < 150
    assert abs(len(scenario.with_overrides(upscale=2.5).workload(3)) - 2250) < 237


def test_the_work_of_best_effort_is_the_same_whenever_it_is_asked_for() -> None:
    """Uniform lengths of BROS, asked for in two orders; the next seed has others."""
    scenario = load_scenario("bros-13b")
    one, again, other = (scenario.workload(seed).best_effort for seed in (1, 1, 2))
    assert one is not None
    assert again is not None
    assert other is not None
    assert (one.batch, one.num_batches, one.max_tokens) == (32, 2, 1024 + 128)
    forward = [one.request(i, 3, 1000) for i in range(200)]
    backward = [again.request(i, 3, 1000) for i in reversed(range(200))][::-1]
    assert [(p.tolist(), n) for p, n in forward] == [(p.tolist(), n) for p, n in backward]
    prompts, outputs = [prompt.size for prompt, _ in forward], [num_output for _, num_output in forward]
    assert [min(prompts), max(prompts)] == pytest.approx([512, 1024], abs=10)
    assert [min(outputs), max(outputs)] == pytest.approx([32, 128], abs=3)
    assert [other.request(i, 3, 1000)[1] for i in range(200)] != outputs
    assert min(prompt.min() for prompt, _ in forward) >= 3


def test_best_effort_leaves_the_other_requests_alone() -> None:
    """The same requests of people with and without it."""
    scenario = load_scenario("bros-13b")
    mixed = scenario.workload(5)
    alone = scenario.model_copy(update={"best_effort": None}).workload(5)
    assert _columns(mixed) == _columns(alone) == _columns(mixed.without_best_effort())
    assert mixed.without_best_effort().best_effort is alone.best_effort is None
    assert set(mixed.tier) == {Tier.DEFAULT}
    assert mixed.longest == 2048
    assert mixed.slo == LatencyLimits(ttft_s=0.4, tpot_s=0.2)


def test_a_share_of_the_arrivals_is_of_those_that_nobody_waits_for() -> None:
    """About 935 arrivals; five deviations of a share of 0.3 are 0.075. The others are as they were."""
    scenario = load_scenario("andes-cyclic")
    plain, mixed = scenario.workload(3), scenario.model_copy(update={"best_effort_share": 0.3}).workload(3)
    kept = mixed.tier == Tier.DEFAULT
    assert (mixed.tier == Tier.FLEX).mean() == pytest.approx(0.3, abs=0.075)
    for name in ("arrival_s", "num_prompt", "num_output"):
        assert np.array_equal(getattr(mixed, name), getattr(plain, name)), name
    assert np.isnan(mixed.qoe_speed[~kept]).all()
    assert np.array_equal(mixed.qoe_speed[kept], plain.qoe_speed[kept])
    assert np.array_equal(mixed.qoe_ttft_s[kept], plain.qoe_ttft_s[kept])
    assert len(mixed.without_best_effort()) == kept.sum()


def test_a_share_of_the_answers_thinks_first_and_nothing_else_changes() -> None:
    """About 935 answers; five deviations of a share of a half are 0.082, of the mean of 470 log-normal ones a quarter.

    Best effort does not think, and nobody thinks beyond the context.
    """
    scenario = load_scenario("andes-cyclic").model_copy(update={"best_effort_share": 0.3})
    plain = scenario.workload(3)
    thinking = ThinkingLoad(share=0.5, tokens=400)
    mixed, again = (scenario.model_copy(update={"thinking": thinking}).workload(3) for _ in range(2))
    assert not plain.num_thinking.any()
    assert mixed.num_thinking.tolist() == again.num_thinking.tolist()
    thinks = mixed.num_thinking > 0
    assert not thinks[mixed.tier == Tier.FLEX].any()
    assert thinks[mixed.tier == Tier.DEFAULT].mean() == pytest.approx(0.5, abs=0.082)
    assert mixed.num_thinking[thinks].mean() == pytest.approx(400, rel=0.25)
    assert (mixed.num_output - mixed.num_thinking).tolist() == plain.num_output.tolist()
    assert [
        name
        for name in ("arrival_s", "num_prompt", "qoe_ttft_s", "qoe_speed", "tier")
        if not np.array_equal(getattr(mixed, name), getattr(plain, name), equal_nan=True)
    ] == []
    short = scenario.model_copy(update={"thinking": thinking, "max_request_tokens": 900}).workload(3)
    assert (short.num_prompt + short.num_output).max() <= 900
    assert len({short.num_prompt[i] + short.num_output[i] for i in np.flatnonzero(short.num_thinking)}) > 1


def _traced(**changes: Any) -> Scenario:
    arrivals = {"kind": "trace", "file": str(TRACES / "whole_seconds.csv"), "spread_s": 0.0}
    return validated({**SMALL, "duration_s": None, "arrivals": arrivals, "lengths": "trace", **changes}, "traced")


def test_a_trace_s_own_lengths_come_in_their_order() -> None:
    """Twelve of 30 arrivals: the ten records of the file, then the first again."""
    workload = _traced(upscale=3.0).workload(1)
    own = [310, 480, 95, 500, 455, 21, 1200, 470, 640, 515]
    assert workload.num_prompt.tolist() == own * 3
    assert workload.arrival_s.tolist() == np.repeat([0, 0, 2, 3, 3, 3, 5, 5, 9, 12], 3).tolist()
    assert workload.name == "whole_seconds x3, trace lengths"


def test_lengths_of_one_log_type_are_dealt_to_all_arrivals() -> None:
    workload = _traced(lengths="trace:conversation").workload(1)
    assert workload.num_prompt.tolist() == [310, 95, 21, 1200, 640, 310, 95, 21, 1200, 640]


def test_a_window_of_a_trace_is_all_that_there_is(traces: Path) -> None:
    """Arrivals 2 3 3 3 of 0 0 2 3 3 3 5 5 9 12, from 1 on; lengths are dealt from the same four records."""
    arrivals = {"kind": "trace", "file": str(TRACES / "whole_seconds.csv"), "spread_s": 0.0, "window_s": [1, 5]}
    workload = _traced(arrivals=arrivals, upscale=2.0).workload(1)
    assert workload.arrival_s.tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    assert workload.num_prompt.tolist() == [95, 500, 455, 21] * 2
    assert workload.name == "whole_seconds[1:5] x2, trace lengths"


def test_a_window_holds_what_the_whole_file_has_there(traces: Path) -> None:
    """A whole factor draws nothing, so without spreading the window's arrivals are the file's own."""
    arrivals = {"kind": "trace", "file": "burstgpt_1h.csv", "spread_s": 0.0}
    whole = _traced(arrivals=arrivals, upscale=3.0).workload(1, traces).arrival_s
    part = _traced(arrivals={**arrivals, "window_s": [1000, 1640]}, upscale=3.0).workload(1, traces).arrival_s
    assert part.size > 100
    assert part.tolist() == (whole[(whole >= 1000) & (whole < 1640)] - 1000).tolist()


def test_a_window_can_be_given_beside_the_file(traces: Path) -> None:
    scenario = load_scenario("kunserve-v2")
    changed = scenario.with_overrides(trace=traces / "burstgpt_1h.csv", window_s=(1084.0, 1284.0))
    assert changed.duration_s == 200
    assert changed.workload(1).name == "burstgpt_1h[1084:1284] x88, burstgpt-conversation lengths"
    kept = scenario.with_overrides(window_s=(100.0, 300.0), duration_s=150.0)
    assert kept.duration_s == 150
    assert 140 < kept.workload(1, traces).arrival_s[-1] < 150


def test_another_file_comes_without_the_window_of_the_first(traces: Path) -> None:
    windowed = load_scenario("kunserve-v2").with_overrides(window_s=(100.0, 300.0))
    changed = windowed.with_overrides(trace=traces / "burstgpt_1h.csv")
    assert changed.workload(1).name == "burstgpt_1h x88, burstgpt-conversation lengths"
    extreme = load_scenario("kunserve-v2-extreme").with_overrides(window_s=(0.0, 100.0))
    assert extreme.with_overrides(trace=traces / "burstgpt_1h.csv").workload(1).name.startswith("burstgpt_1h x")


def test_windows_that_cannot_be_are_refused(traces: Path) -> None:
    scenario = load_scenario("kunserve-v2")
    with pytest.raises(StartupError, match="a window does not go with arrivals that are drawn"):
        load_scenario("mell-7b").with_overrides(window_s=(0.0, 10.0))
    with pytest.raises(StartupError, match="window_s must end after it starts"):
        scenario.with_overrides(window_s=(10.0, 10.0))
    with pytest.raises(StartupError, match="no request of trace burstgpt_640s arrives from 9000 to 9001 s"):
        scenario.with_overrides(window_s=(9000.0, 9001.0)).workload(1, traces)


def test_standard_loads_differ_in_nothing_but_the_load() -> None:
    """And from `kunserve-v2` in the window too: what they say of fcfs would else be of something else."""
    standard = [load_scenario(name) for name in scenario_names() if name.startswith("standard-")]
    own = {"name", "title", "upscale", "left_open"}
    settings = [each.model_dump(exclude=own) for each in standard]
    assert {each.name for each in standard} == {"standard-2", "standard-5", "standard-15"}
    assert all(each == settings[0] for each in settings)
    assert [each.upscale for each in sorted(standard, key=lambda each: int(each.name[9:]))] == sorted(
        {each.upscale for each in standard}
    )
    others = load_scenario("kunserve-v2").model_dump(exclude={*own, "arrivals", "systems"})
    assert {name: settings[0][name] for name in others} == others


def test_lengths_can_be_scaled_and_are_cut_to_the_longest_request() -> None:
    workload = _traced(lengths_scale=10.0, max_request_tokens=4000).workload(1)
    assert workload.num_output[:3].tolist() == [1200, 450, 2000]
    assert workload.num_prompt[:3].tolist() == [2800, 3550, 950]


def test_whole_seconds_are_spread_and_finer_times_are_not() -> None:
    spread = _traced(arrivals={"kind": "trace", "file": str(TRACES / "whole_seconds.csv")}).workload(1)
    assert np.floor(spread.arrival_s).tolist() == [0, 0, 2, 3, 3, 3, 5, 5, 9, 12]
    assert len(set(spread.arrival_s.tolist())) == 10
    fine = _traced(arrivals={"kind": "trace", "file": str(TRACES / "fine.csv")}).workload(1)
    assert fine.arrival_s.tolist() == [0, 0.25, 0.5]


def test_flags_replace_what_a_file_says(traces: Path) -> None:
    scenario = load_scenario("kunserve-v2")
    changed = scenario.with_overrides(
        instances=2,
        upscale=3.0,
        lengths="sharegpt",
        trace=TRACES / "whole_seconds.csv",
        slo=SloSpec(ttft_s=1, tpot_s=1),
    )
    assert (changed.instances, changed.upscale, changed.lengths) == (2, 3.0, "sharegpt")
    assert changed.slo == SloSpec(ttft_s=1, tpot_s=1)
    assert changed.workload(1, traces).name == "whole_seconds x3, sharegpt lengths"
    assert (changed.model, changed.tp, changed.left_open) == (scenario.model, 1, scenario.left_open)
    assert scenario.with_overrides(upscale=None, trace=None) == scenario


def test_another_gpu_takes_its_own_memory_and_count() -> None:
    scenario = load_scenario("kunserve-v2-72b").model_copy(update={"kv_tokens": 1000})
    assert scenario.instance().kv_tokens == 1000
    changed = scenario.with_overrides(model="llama-3-8b", gpu="h200")
    assert (changed.tp, changed.kv_tokens) == (None, None)
    assert changed.instance().name == "llama-3-8b-tp1-h200"
    assert changed.with_overrides(gpu="h200", kv_tokens=5).instance().kv_tokens == 5


def test_a_rate_replaces_the_drawn_one() -> None:
    scenario = load_scenario("mell-7b").with_overrides(rate_per_s=5.0)
    assert len(scenario.workload(1)) == pytest.approx(3000, abs=300)
    with pytest.raises(StartupError, match="a rate does not go with arrivals from a trace"):
        load_scenario("kunserve-v2").with_overrides(rate_per_s=5.0)


def test_a_burst_lasts_until_the_run_ends(traces: Path) -> None:
    """The window [48, 78) again and again: from 78 s on every 30 s hold the same number of requests."""
    workload = load_scenario("kunserve-v2-extreme").workload(1, traces)
    counts = np.histogram(workload.arrival_s, np.arange(48, 289, 30))[0]
    assert len(set(counts.tolist())) == 1
    assert counts[0] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"instances": 0}, "instances: Input should be greater than or equal to 1"),
        ({"upscal": 2}, "upscal: there is no such field. Did you mean upscale?"),
        ({"duration_s": None}, "duration_s is needed: only a trace ends by itself"),
        ({"arrivals": {"kind": "poison"}}, "arrivals: Input tag 'poison'"),
        ({"arrivals": {"kind": "poisson"}}, "arrivals.poisson.rate_per_s: Field required"),
        (
            {"arrivals": {"kind": "cyclic-bursts", "rate_per_s": 1, "intensity": 4, "burst_ratio": 0.5}},
            "intensity * burst_ratio must be at most 1",
        ),
        (
            {"arrivals": {"kind": "one-burst", "rate_per_s": 1, "factor": 2, "burst_start_s": 5, "burst_end_s": 5}},
            "burst_end_s must be after burst_start_s",
        ),
    ],
)
def test_what_is_wrong_with_a_scenario_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        validated({**SMALL, **changes}, "scenario small")
    assert str(caught.value).startswith("sluice: scenario small: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": "sharegptt"}, "Did you mean sharegpt?"),
        ({"lengths": "trace"}, "lengths 'trace' need arrivals from a trace"),
        ({"upscale": 0.0}, "no request arrives in scenario small"),
        ({"arrivals": {"kind": "trace", "file": "nowhere.csv"}}, "the trace nowhere.csv is not in"),
        ({"arrivals": {"kind": "trace", "file": "/nowhere.csv"}}, "there is no trace /nowhere.csv"),
        (
            {"arrivals": {"kind": "trace", "file": "whole_seconds.csv"}, "lengths": "trace:code"},
            "trace whole_seconds has no row of log type 'code'. It has api, conversation",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as caught:
        validated({**SMALL, **changes}, "scenario small").workload(1, TRACES)
    assert message in str(caught.value)


def test_a_scenario_is_read_from_a_file_of_one_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'model = "llama-3-8b"\ngpu = "h200"\ninstances = 1\nlengths = "64x16"\nduration_s = 50\n'
        '[arrivals]\nkind = "poisson"\nrate_per_s = 2.0\n'
    )
    scenario = load_scenario(path)
    assert scenario.name == "mine"
    assert load_scenario(str(path)) == scenario
    assert set(scenario.workload(1).num_prompt.tolist()) == {64}


def test_files_and_names_that_are_no_scenario_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no scenario 'kunserve-v3'\. Did you mean kunserve-v2\? There are "):
        load_scenario("kunserve-v3")
    with pytest.raises(StartupError, match="cannot be read"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("model = ")
    with pytest.raises(StartupError, match="is not valid TOML"):
        load_scenario(tmp_path / "bad.toml")
