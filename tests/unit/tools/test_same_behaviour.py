from __future__ import annotations

from typing import Any

from shared.systems import SYSTEMS
from tools.same_behaviour import EVENTS, FULL, count_events, first_difference, troubles

EVERYTHING = (
    "info role_changed  plan=1 layers=[0, 2) before=[0, 4) group=w1 stage=0 num_blocks=100 resident=[0, 2) took_s=0.02",
    "info kv_exchange_ended  num_bytes=9 num_moved_bytes=9 took_s=0.1 mode=coordinated outcome=all 9 blocks are there",
    "info kv_exchange_ended  num_bytes=9 num_moved_bytes=9 took_s=0.1 mode=live outcome=all 9 blocks are there",
    "info parameters_beside  plan=2 layers=[0, 2) before=[0, 2) group=w1 stage=0 num_blocks=53 resident=[0, 4)",
    "info parameters_beside  plan=3 layers=[0, 2) before=[0, 2) group=w1 stage=0 num_blocks=99 resident=[0, 2)",
    "info kv_copied  num_blocks=9 is_whole=True took_s=0.1",
    "info role_changed  plan=4 layers=[0, 4) before=[0, 2) group= stage=0 num_blocks=40 resident=[0, 4) took_s=1.4",
    "info requests_moved  epoch=5 reason=3 waiting requests go from w0 to w1, which have room",
)
"""A line for each of `EVENTS`, in their order."""


def outcome(*, ttft_s: float = 0.5, lines: tuple[str, ...] = EVERYTHING) -> dict[str, Any]:
    figures = {"fcfs": {"ttft_s": {"p50": 0.1, "p99": 0.2}}, "kunserve": {"ttft_s": {"p50": 0.1, "p99": ttft_s}}}
    return {"window": {"per_seed": {"0": figures}}, "faults": {"groups seed 7": list(lines)}}


def test_what_is_the_same_is_no_trouble() -> None:
    assert troubles(outcome(), outcome()) == []


def test_the_first_figure_that_differs_is_named_with_its_run_seed_and_system() -> None:
    found = first_difference(outcome(), outcome(ttft_s=0.75, lines=()))
    assert found == "window › per_seed › 0 › kunserve › ttft_s › p99\n  before: 0.5\n  after:  0.75"


def test_of_a_trace_the_seed_and_the_first_differing_line_are_named() -> None:
    before, after = ({"groups seed 7": ["same", *rest]} for rest in (["old", "late"], ["new"]))
    assert first_difference(before, after) == 'groups seed 7 › line 2\n  before: "old"\n  after:  "new"'


def test_what_comes_or_goes_is_a_difference() -> None:
    assert first_difference(["same", "gone"], ["same"]) == 'line 2\n  before: "gone"\n  after:  nothing'
    assert first_difference({"a": 1}, {"a": 1, "b": None}) == "b\n  before: nothing\n  after:  null"


def test_equal_numbers_whose_bytes_differ_are_a_difference() -> None:
    assert first_difference({"drops": 1}, {"drops": 1.0}) == "drops\n  before: 1\n  after:  1.0"
    assert first_difference({"a": 1, "b": 2}, {"b": 2, "a": 1}) is not None


def test_each_kind_of_event_is_counted_by_its_line() -> None:
    for name, line in zip(EVENTS, EVERYTHING, strict=True):
        assert count_events({"log": [line, "info plan_none  epoch=1 reason=calm"]}) == {name: 1}


def test_equal_runs_in_which_something_never_happened_prove_too_little() -> None:
    lacking = outcome(lines=EVERYTHING[:-1])
    assert troubles(lacking, lacking) == [
        "never happened before: rebalance; that proves too little",
        "never happened after: rebalance; that proves too little",
    ]


def test_each_run_that_differs_says_where() -> None:
    found = troubles(outcome(), outcome(ttft_s=0.75, lines=("info other  ", *EVERYTHING)))
    assert [text.splitlines()[0] for text in found] == [
        "first difference: window › per_seed › 0 › kunserve › ttft_s › p99",
        "first difference: faults › groups seed 7 › line 1",
    ]


def test_every_system_runs() -> None:
    for run in FULL:
        if run.task == "compare":
            assert set(run.arguments[run.arguments.index("--systems") + 1].split(",")) == set(SYSTEMS)
