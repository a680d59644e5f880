"""`sluice replay`: what it sends, what it takes from a server's own figures, and what it reports."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.report import lateness_p99_s
from cli.bench.stream import BenchRecord
from cli.console import Console
from cli.exit_codes import DONE, FAILED, KILLED, UNREACHABLE, CommandError
from cli.replay.command import ReplaySettings, run_replay
from cli.replay.load import fit_context
from cli.replay.metrics import MetricsSample, read_sample
from cli.replay.records import records_of
from cli.replay.remarks import remarks_on
from cli.replay.sender import FIRST_TOKEN_ID, VOCAB_SIZE
from cli.replay.watch import ServerWatch
from shared.errors import StartupError
from shared.messages.report import ClusterView, WorkerReport
from sim.workload.workload import Workload
from tests.support.openai_server import Engine, Server, refuse, running, say
from tests.support.workloads import plain_workload
from tests.unit.cli.conftest import Refusal

UNASKED = cast("aiohttp.ClientSession", None)
"""For a watch that asks nothing."""
HEAD = "arrival_s,input_tokens,output_tokens,log_type\n"
METRICS = """# HELP vllm:kv_cache_usage_perc Share
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a b"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="a b"} 0.75 1700000000000
vllm:num_preemptions_total{engine="0",model_name="x"} 3.0
vllm:num_preemptions_total{engine="1",model_name="x"} 4e0
vllm:time_to_first_token_seconds_bucket{le="+Inf"} NaN
what is this
"""


def vllm(kind: type[Engine] = Engine, *, limit: int = 512, **options: Any) -> Engine:
    """An engine with a context of so many tokens and with metrics."""
    models = {"object": "list", "data": [{"id": "demo", "owned_by": "vllm", "max_model_len": limit}]}
    return kind(models=say(models), metrics=say(METRICS), **options)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    path.write_text(HEAD + "0.0,7,2,api\n0.01,30,5,conversation\n0.02,16,3,api\n")
    return path


async def replay(engine: Server, trace: Path, **settings: Any) -> tuple[int, str]:
    async with running(engine) as url:
        return await run_replay(ReplaySettings(trace, url, **settings), Console())


async def test_a_trace_is_replayed_with_its_exact_lengths_and_reported_as_a_comparison(
    trace: Path, tmp_path: Path
) -> None:
    engine, out = vllm(), tmp_path / "out.json"
    code, text = await replay(engine, trace, json_file=str(out), slo=(60.0, 60.0))
    assert code == DONE, text
    bodies = sorted(engine.streams, key=lambda body: int(body["max_tokens"]))  # a later one may arrive before
    prompts = [body["prompt"] for body in bodies]
    assert [len(prompt) for prompt in prompts] == [7, 16, 30]
    assert all(FIRST_TOKEN_ID <= token < VOCAB_SIZE for prompt in prompts for token in prompt)
    assert [(body["max_tokens"], body["ignore_eos"]) for body in bodies] == [(2, True), (3, True), (5, True)]
    assert "qoe" not in engine.streams[0], "only our own server is told of readers"
    comparison = json.loads(out.read_text())
    assert set(comparison) == {"scenario", "seeds", "systems", "gap_closed"}
    assert comparison["scenario"]["prompts"] == "token ids"
    assert comparison["gap_closed"] == {"vllm": {"ttft_p99": None, "qoe_mean": None, "qoe_share_ge_0_95": None}}
    found = comparison["systems"]["vllm"]
    assert (found["requests"], found["completed"], found["refused"]) == (3, 3, 0)
    assert (found["kv_peak_ratio"], found["preemptions"], found["demand_over_capacity_peak"]) == (0.5, 0, None)
    assert found["slo"]["both_share"] == 1.0
    assert 0 < found["ttft_s"]["p50"] <= found["ttft_s"]["p999"]
    assert "vllm" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("engine", "path"),
    [(vllm(takes_ids=False), "/v1/completions"), (vllm(has_completions=False), "/v1/chat/completions")],
)
async def test_a_server_that_takes_no_ids_gets_words_of_about_the_same_length(
    engine: Engine, path: str, trace: Path
) -> None:
    """Every word is two tokens there: 7, 30 and 16 tokens are 4, 15 and 8 words (7 / 2 is rounded to even)."""
    code, text = await replay(engine, trace, name="other")
    assert code == DONE, text
    assert [where for where, _, body in engine.requests if body and body.get("stream")] == [path] * 3
    prompts = [body["messages"][0]["content"] if "messages" in body else body["prompt"] for body in engine.streams]
    assert sorted(len(prompt.split()) for prompt in prompts) == [4, 8, 15]
    assert "other" in text.splitlines()[0]


class Beside(Engine):
    """Answers the trace only when it has answered so many requests of best effort, or refused one."""

    def __init__(self, num_first: int, *, refuses: bool = False, **options: Any) -> None:
        models = {"data": [{"id": "demo", "owned_by": "sluice", "max_model_len": 512}]}
        super().__init__(models=say(models), metrics=say(METRICS), **options)
        self.num_first, self.refuses_beside = num_first, refuses
        self.is_turn = asyncio.Event()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = self.posts[-1]
        if body.get("service_tier") == "flex":
            if self.refuses_beside or len(self.beside) > self.num_first:
                self.is_turn.set()
            if self.refuses_beside:
                return await refuse(429, "resource unavailable")(request)
        elif body.get("stream"):
            await self.is_turn.wait()
        return await super().complete(request)

    @property
    def beside(self) -> list[Any]:
        return [body for body in self.streams if body.get("service_tier") == "flex"]


async def test_best_effort_goes_on_beside_the_trace_and_has_its_own_figures(trace: Path, tmp_path: Path) -> None:
    """Two at a time, of the trace's lengths: 7, 30, 16, 7 … tokens, and no prompt twice."""
    engine, out = Beside(12), tmp_path / "out.json"
    code, text = await replay(engine, trace, best_effort=(2, ""), json_file=str(out))
    assert code == DONE, text
    prompts = [body["prompt"] for body in engine.beside]
    assert [len(prompt) for prompt in prompts] == [(7, 30, 16)[i % 3] for i in range(len(prompts))]
    assert len({tuple(body["prompt"]) for body in engine.streams}) == len(engine.streams)
    assert all(body["ignore_eos"] and "qoe" not in body for body in engine.beside)
    comparison = json.loads(out.read_text())
    found = comparison["systems"]["sluice"]
    best_effort = found["best_effort"]
    assert comparison["scenario"]["best_effort"] == [2, ""]
    assert (found["requests"], found["completed"], best_effort["refused"]) == (3, 3, 0)
    assert best_effort["completed"] >= 11
    assert best_effort["unfinished"] <= 2
    assert best_effort["completed"] + best_effort["unfinished"] == best_effort["requests"] <= len(prompts) + 2
    assert 0 < found["drained_s"] < found["cut_off_s"] + 10
    assert found["drained"]["tokens_per_s"] >= best_effort["drained"]["tokens_per_s"] > 0
    assert "best effort: tokens/s when drained" in text


async def test_best_effort_may_be_of_a_data_set(trace: Path, tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"prompt": f"document {i}", "max_tokens": 3}) + "\n" for i in range(4)))
    engine = Beside(9)
    code, text = await replay(engine, trace, best_effort=(1, str(documents)))
    assert code == DONE, text
    assert [body["prompt"] for body in engine.beside] == [f"document {i % 4}" for i in range(len(engine.beside))]
    assert {(body["max_tokens"], body["ignore_eos"]) for body in engine.beside} == {(3, False)}


async def test_refused_best_effort_is_named_and_leaves_the_trace_s_figures_alone(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = await replay(Beside(0, refuses=True), trace, best_effort=(2, ""), json_file=str(out))
    assert code == FAILED
    assert "best effort failed: 2 × http 429: resource unavailable" in text
    found = json.loads(out.read_text())["systems"]["sluice"]
    assert (found["completed"], found["refused"], found["best_effort"]["refused"]) == (3, 0, 2)


async def test_failed_requests_are_counted_and_named(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, text = await replay(vllm(refuses=True), trace, json_file=str(out))
    assert code == FAILED
    assert "failed: 1 × http 429: full" in text
    found = json.loads(out.read_text())["systems"]["vllm"]
    assert (found["requests"], found["completed"], found["refused"]) == (3, 2, 1)


async def test_ctrl_c_ends_the_load_and_gives_the_figures_so_far(trace: Path, tmp_path: Path) -> None:
    """The third answer never comes: whoever waits for it presses Ctrl-C once the first two are there."""

    class Stuck(Engine):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            if len(self.streams) == 3:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            return await super().complete(request)

    out = tmp_path / "out.json"
    code, text = await replay(vllm(Stuck), trace, json_file=str(out))
    assert code == KILLED
    assert text.endswith("stopped by Ctrl-C; the figures are those of the answers so far")
    found = json.loads(out.read_text())["systems"]["vllm"]
    assert (found["requests"], found["refused"]) == (3, 3 - found["completed"])
    assert found["completed"] <= 2


async def test_without_matplotlib_figures_are_refused_before_anything_is_sent(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    engine = vllm()
    with pytest.raises(StartupError, match="matplotlib"):
        await replay(engine, trace, plot_folder=tmp_path / "figures")
    assert not engine.streams


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is an optional extra")
async def test_figures_are_drawn(trace: Path, tmp_path: Path) -> None:
    code, text = await replay(vllm(), trace, plot_folder=tmp_path / "figures")
    assert code == DONE, text
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".png", ".svg"}


async def test_what_the_context_cannot_hold_is_cut(trace: Path) -> None:
    """Of 20 tokens the answer gets 10 at most and the prompt the rest: 30 + 5 becomes 15 + 5."""
    engine = vllm(limit=20)
    assert (await replay(engine, trace))[0] == DONE
    assert sorted((len(body["prompt"]), body["max_tokens"]) for body in engine.streams) == [(7, 2), (15, 5), (16, 3)]


async def test_what_cannot_be_replayed_is_refused_in_one_line(trace: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"nothing answers at http://127\.0\.0\.1:1 ") as found:
        await run_replay(ReplaySettings(trace, "http://127.0.0.1:1"), Console())
    assert found.value.code == UNREACHABLE
    with pytest.raises(CommandError, match=r"does not serve 'other'\. It serves: demo"):
        await replay(vllm(), trace, model="other")
    with pytest.raises(StartupError, match="there is no folder"):
        await replay(vllm(), trace, json_file=str(tmp_path / "none" / "x.json"))


async def test_a_trace_with_a_bad_line_is_refused_before_the_server_is_asked(tmp_path: Path) -> None:
    engine = vllm()
    with pytest.raises(StartupError, match=r"bad\.csv, line 3: input_tokens is '0'"):
        await replay(engine, bad_trace(tmp_path))
    assert not engine.streams


def bad_trace(folder: Path) -> Path:
    path = folder / "bad.csv"
    path.write_text(HEAD + "0.0,7,2,api\n1.0,0,2,api\n")
    return path


def test_the_command_line_names_what_is_wrong(refusal: Refusal, tmp_path: Path, trace: Path) -> None:
    for argv, said in (
        ([str(tmp_path / "none.csv")], "none.csv' does not exist"),
        ([str(trace), "--slo", "ttft=1"], "tpot=NUMBER is missing"),
        ([str(trace), "--lengths", "shargpt"], "sharegpt"),
        ([str(trace), "--upscale", "0"], "--upscale"),
    ):
        assert said in refusal("replay", *argv)


def test_flags_change_arrivals_and_lengths(trace: Path) -> None:
    def load(**flags: Any) -> Workload:
        return ReplaySettings(trace, "", **flags).workload()

    plain = load()
    assert plain.num_prompt.tolist() == [7, 30, 16]
    assert plain.arrival_s.tolist() == [0.0, 0.01, 0.02]
    assert len(load(upscale=3.0)) == 9
    assert load(duration_s=0.015).num_output.tolist() == [2, 5]
    assert load(lengths="64x8").num_prompt.tolist() == [64] * 3
    assert load(reader=(2.0, 9.0)).qoe_speed.tolist() == [9.0] * 3


@given(st.integers(2, 300), st.integers(1, 1000), st.integers(1, 1000), st.booleans())
def test_what_is_cut_to_the_context_fits(context: int, num_prompt: int, num_output: int, is_exact: bool) -> None:
    fitted, num_cut = fit_context(plain_workload([0.0], num_prompt, num_output), context, is_exact=is_exact)
    prompt, output = int(fitted.num_prompt[0]), int(fitted.num_output[0])
    assert prompt + output <= context
    assert min(prompt, output) >= 1
    assert num_cut == ((prompt, output) != (num_prompt, num_output))


def outcome(index: int, due_s: float, tokens: list[tuple[float, int]], failure: str = "") -> BenchRecord:
    end_s = tokens[-1][0] if tokens else due_s
    return BenchRecord(
        index, due_s, due_s + 0.5, end_s, tokens, 5, sum(count for _, count in tokens), is_counted=True, failure=failure
    )


def test_records_count_from_sending_and_leave_out_what_was_not_sent() -> None:
    """Four requests, three sent, half a second late each; the third is still under way."""
    workload = plain_workload([0.0, 1.0, 2.0, 3.0], num_output=3)
    outcomes = [outcome(0, 0.0, [(1.0, 1), (1.5, 2)]), outcome(1, 1.0, [], "http 429"), outcome(2, 2.0, [(3.0, 1)])]
    outcomes[2].end_s = None
    records = records_of(workload, outcomes)
    assert records.failure == ("", "http 429", "unfinished")
    assert records.ttft_s[0] == pytest.approx(0.5)
    assert records.num_tokens.tolist() == [3, 0, 1]
    assert records.arrival_s.tolist() == [0.5, 1.5, 2.5]
    assert lateness_p99_s(outcomes) == pytest.approx(0.5)
    assert lateness_p99_s([]) is None


def test_an_answer_without_text_is_whole_if_its_tokens_were_counted() -> None:
    workload = plain_workload([0.0, 1.0], num_output=3)
    outcomes = [outcome(0, 0.0, [(1.0, 3)], "empty"), outcome(1, 1.0, [], "empty")]
    outcomes[0].deliveries = []
    outcomes[1].is_counted = False
    records = records_of(workload, outcomes)
    assert records.failure == ("", "empty")
    assert records.token_s.tolist() == [1.0] * 3
    assert "1 answers had no text: their tokens count as come at their ends" in remarks_on(outcomes, records)


def test_remarks_say_what_makes_the_figures_less() -> None:
    workload = plain_workload([0.0, 1.0], num_output=3)
    outcomes = [outcome(0, 0.0, [(1.0, 2)]), outcome(1, 1.0, [], "timeout")]
    remarks = remarks_on(outcomes, records_of(workload, outcomes))
    assert [line.split(":")[0] for line in remarks] == [
        "failed",
        "1 answers are shorter than the trace's",
        "the load itself was late by 500 ms (p99)",
    ]
    outcomes[0].is_counted = False
    assert any("no usage" in line for line in remarks_on(outcomes, records_of(workload, outcomes)))


def test_metrics_are_read_by_the_names_of_several_engines() -> None:
    assert read_sample(METRICS) == MetricsSample(0.5, 7.0)
    assert read_sample('sglang:token_usage{model_name="m"} 0.125\n') == MetricsSample(0.125, None)
    waiting = 'vllm:num_requests_waiting{engine="0"} 3\nvllm:num_requests_waiting{engine="1"} 4\n'
    assert read_sample(waiting) == MetricsSample(None, None, 7.0)
    assert read_sample("sglang:num_queue_reqs 9\n") == MetricsSample(None, None, 9.0)
    assert read_sample("<html>\n\x00 1 2 3\nvllm:num_preemptions_total x\n") == MetricsSample(None, None)


def report(worker_id: str, **fields: Any) -> dict[str, Any]:
    base = {"worker_id": worker_id, "sequence_number": 0, "phase": "ready", "num_blocks": 100, "device": "cuda:0"}
    return {"liveness": "alive", "age_s": 0.1, "report": WorkerReport.model_validate(base | fields)}


def test_a_view_gives_peaks_over_all_workers_that_serve() -> None:
    """Used 30 + 50 of 200, then 90 + 60 with 100 more wanted; a dead worker and a loading one count for nothing."""
    watch = ServerWatch(UNASKED, "", lambda: 0.0)
    dead = report("w2", num_used_blocks=100) | {"liveness": "dead"}
    loading = report("w3", phase="loading")
    first = (report("w0", num_used_blocks=30), report("w1", num_used_blocks=50, num_waiting=1), dead, loading)
    second = (report("w0", num_used_blocks=90, num_demanded_blocks=100), report("w1", num_used_blocks=60))
    for at_s, workers in ((0.0, first), (2.0, second)):
        watch.take_view(ClusterView.model_validate({"sequence_number": 0, "workers": workers}), at_s)
    watch.take_sample(MetricsSample(0.99, 5.0))
    for num_waiting in (0.0, 9.0, 4.0):
        watch.take_sample(MetricsSample(0.98, 8.0, num_waiting))
    facts = watch.facts()
    assert facts.queue_peak == 9
    assert (facts.kv_peak_ratio, facts.demand_over_capacity_peak) == (0.75, 1.25), "the view goes before the metrics"
    assert (facts.preemptions, facts.gpus_peak, facts.gpu_seconds) == (3, 2, 4.0)
    assert (facts.busy_gpus_peak, facts.busy_gpu_seconds) == (1, 2.0)
    samples = watch.samples()
    assert samples is not None
    assert samples.used_blocks.tolist() == [80, 150]
    watch.take_sample(MetricsSample(0.1, 2.0))
    assert watch.facts().preemptions is None, "the server began anew, so nobody knows"


def test_a_server_that_says_nothing_leaves_nothing_known() -> None:
    watch = ServerWatch(UNASKED, "", lambda: 0.0)
    facts = watch.facts()
    assert {getattr(facts, name) for name in facts.__dataclass_fields__} == {None}
    assert watch.samples() is None
