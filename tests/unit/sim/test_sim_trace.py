from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import StartupError
from sim.workload.trace import dealt, read_trace, repeated_window, spread, upscaled
from tests.support.sim_traces import TRACES

HEADER = "arrival_s,input_tokens,output_tokens,log_type"
seeds = st.integers(0, 2**32)
whole_times = st.lists(st.integers(0, 60), min_size=1, max_size=80).map(lambda xs: np.array(sorted(xs), dtype=float))


def test_a_trace_is_read_as_it_stands() -> None:
    trace = read_trace(TRACES / "whole_seconds.csv")
    assert trace.name == "whole_seconds"
    assert trace.arrival_s.tolist() == [0, 0, 2, 3, 3, 3, 5, 5, 9, 12]
    assert trace.num_prompt[:3].tolist() == [310, 480, 95]
    assert trace.num_output[:3].tolist() == [120, 45, 260]
    assert trace.log_type[:2] == ("conversation", "api")
    assert trace.has_whole_seconds


def test_rows_are_put_in_order_and_the_first_is_due_at_zero() -> None:
    trace = read_trace(TRACES / "fine.csv")
    assert trace.arrival_s.tolist() == [0, 0.25, 0.5]
    assert trace.num_prompt.tolist() == [100, 300, 200]
    assert trace.log_type == ("", "", "")
    assert not trace.has_whole_seconds


@given(st.integers(0, 12), st.integers(1, 13))
def test_a_window_holds_what_arrives_in_it_counted_from_its_start(start: int, length: int) -> None:
    """Arrivals 0 0 2 3 3 3 5 5 9 12; the oracle asks each row."""
    trace = read_trace(TRACES / "whole_seconds.csv")
    expected = [i for i, time in enumerate(trace.arrival_s.tolist()) if start <= time < start + length]
    if not expected:
        with pytest.raises(StartupError, match=f"arrives from {start} to {start + length} s"):
            trace.window(start, start + length)
        return
    window = trace.window(start, start + length)
    assert window.arrival_s.tolist() == [trace.arrival_s[i] - start for i in expected]
    assert window.num_prompt.tolist() == [trace.num_prompt[i] for i in expected]
    assert window.num_output.tolist() == [trace.num_output[i] for i in expected]
    assert window.log_type == tuple(trace.log_type[i] for i in expected)
    assert window.name == f"whole_seconds[{start}:{start + length}]"


def test_a_window_that_starts_within_a_second_leaves_the_source_s_resolution() -> None:
    window = read_trace(TRACES / "whole_seconds.csv").window(1.5, 4)
    assert window.arrival_s.tolist() == [0.5, 1.5, 1.5, 1.5]
    assert window.has_whole_seconds
    assert not read_trace(TRACES / "fine.csv").window(0, 0.1).has_whole_seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER}\n0,10,5,api\n1,0,5,api\n", "line 3: input_tokens is '0'"),
        (f"{HEADER}\n0,10,five,api\n", "line 2: output_tokens is 'five'"),
        (f"{HEADER}\n0,10,2.5,api\n", "line 2: output_tokens is '2.5'"),
        (f"{HEADER}\n-1,10,5,api\n", "line 2: arrival_s is '-1'"),
        (f"{HEADER}\nnan,10,5,api\n", "line 2: arrival_s is 'nan'"),
        (f"{HEADER}\ninf,10,5,api\n", "line 2: arrival_s is 'inf'"),
        (f"{HEADER}\n0,10\n", "line 2: output_tokens is ''"),
        (f"{HEADER}\n0,99999999,5,api\n", "line 2: input_tokens is '99999999'"),
        ("arrival_s,tokens\n0,1\n", "no column input_tokens or output_tokens"),
        ("", "no column arrival_s or input_tokens or output_tokens"),
        (f"{HEADER}\n", "holds no request"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(StartupError) as caught:
        read_trace(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open, "closed, though the error is held"
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StartupError, match="is not UTF-8 text"):
        read_trace(tmp_path / "bytes.csv")


@given(whole_times, st.floats(0, 6), seeds)
def test_upscaling_emits_each_time_the_whole_factor_or_once_more(times: np.ndarray, factor: float, seed: int) -> None:
    scaled = upscaled(times, factor, np.random.default_rng(seed))
    assert np.all(np.diff(scaled) >= 0)
    values, counts = np.unique(times, return_counts=True)
    found = {value: int(np.sum(scaled == value)) for value in values.tolist()}
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        assert int(factor) * count <= found[value] <= (int(factor) + 1) * count
    assert sum(found.values()) == scaled.size


@given(whole_times, st.integers(0, 6), seeds)
def test_a_whole_factor_leaves_nothing_to_chance(times: np.ndarray, factor: int, seed: int) -> None:
    assert upscaled(times, factor, np.random.default_rng(seed)).tolist() == np.repeat(times, factor).tolist()


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.75, 28.4])
def test_the_load_grows_by_the_factor(factor: float) -> None:
    """20 000 times: the number of extra copies is binomial, five of its deviations are at most 354."""
    times = np.sort(np.random.default_rng(1).random(20_000))
    scaled = upscaled(times, factor, np.random.default_rng(2))
    part = factor - int(factor)
    assert abs(scaled.size - factor * times.size) <= 5 * (times.size * part * (1 - part)) ** 0.5 + 1e-6


def test_every_stretch_of_the_rate_curve_grows_by_the_factor() -> None:
    """A trace whose rate triples in [100, 200): in every 10 s window the counts stay in proportion, ramps included.

    Dividing all times by the factor instead would end the trace at 300 / 7 s.
    """
    random = np.random.default_rng(3)
    times = np.sort(np.floor(np.concatenate([300 * random.random(600), 100 + 100 * random.random(400)])))
    scaled = spread(upscaled(times, 7, np.random.default_rng(4)), 1.0, np.random.default_rng(5))
    edges = np.arange(0, 301, 10)
    assert np.histogram(scaled, edges)[0].tolist() == (7 * np.histogram(times, edges)[0]).tolist()


@given(whole_times, seeds)
def test_spreading_moves_every_time_within_its_second(times: np.ndarray, seed: int) -> None:
    moved = spread(times, 1.0, np.random.default_rng(seed))
    assert np.all(np.diff(moved) >= 0)
    assert np.floor(moved).tolist() == times.tolist()


def test_the_seed_decides() -> None:
    times = np.arange(200.0)
    first, again, other = (upscaled(times, 1.5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.tolist() == again.tolist() != other.tolist()


@given(st.integers(1, 20), st.integers(0, 100))
def test_records_are_dealt_in_their_order_again_from_the_first(num_records: int, num_arrivals: int) -> None:
    records = dealt(num_records, num_arrivals).tolist()
    assert len(records) == num_arrivals
    assert records[:num_records] == list(range(min(num_records, num_arrivals)))
    assert records[num_records:] == records[: max(0, num_arrivals - num_records)]


def test_a_burst_is_repeated_from_its_end_on() -> None:
    """Window [10, 14) holds 10, 11, 13; until 21 there is room for one whole repetition and 3 s of another."""
    times = np.array([0.0, 10, 11, 13, 15, 30])
    assert repeated_window(times, 10, 14, 21).tolist() == [0, 10, 11, 13, 14, 15, 17, 18, 19]


def test_a_burst_that_ends_after_the_run_is_not_repeated() -> None:
    assert repeated_window(np.array([0.0, 10, 11]), 10, 14, 11).tolist() == [0, 10]
