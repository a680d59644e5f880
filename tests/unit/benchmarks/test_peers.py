"""The parts of the comparison with other engines that need none of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import ROOT
from benchmarks.peers import Run, cell, ratio_rows, table_rows
from benchmarks.peers_engines import ChildEngine, Figures, Setting, parse_llama
from benchmarks.peers_load import TICK_S, Share, foreign_share, tree_ticks
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, make_tokenizer
from benchmarks.peers_offline import load
from benchmarks.peers_servers import VllmServer
from cli.processes import is_running
from tests.support.checkpoints import CheckpointShape, stored_checkpoint

LLAMA = """
main: n_kv_max = 8192, n_batch = 2048

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |    128 |    8 |   2048 |    0.250 |  4096.00 |    0.750 |  1365.33 |    1.000 |  2048.00 |

"""


def run(engine: str, batch: int, rate: float, foreign: float = 0.0) -> Run:
    return Run(engine, "float32", batch, Figures(rate, 0.1234, 0.00567), foreign)


def test_llamas_table_is_read() -> None:
    """8 · 128 tokens in 0.25 + 0.75 s; the prompts take 0.25 s, a step 0.75 / 128 s."""
    assert parse_llama(LLAMA) == Figures(1024.0, 0.25, 0.75 / 128)
    with pytest.raises(RuntimeError, match="no row"):
        parse_llama(LLAMA.rsplit("\n", 3)[0])


def test_the_best_of_the_repeats_is_shown_with_their_median() -> None:
    runs = [run("sluice-http", 1, rate) for rate in (90.0, 100.0, 80.0)] + [run("vllm-http", 1, 200.0, 0.07)]
    assert cell(runs[0]) == "90, 123, 5.7"
    assert table_rows(runs, [1, 8]) == [
        ["sluice-http", "100, 123, 5.7 (90)", "-"],
        ["vllm-http", "200, 123, 5.7 !0.07 (200)", "-"],
    ]
    assert ratio_rows(runs, [1, 8]) == [["sluice-http / vllm-http", "0.50", "-"]]


def test_others_share_is_what_neither_engine_nor_client_used() -> None:
    """Of 2 cores · 5 s, 8 s were busy, 6 s of them ours: 2 / 10."""
    assert foreign_share(Share(0.0, 100.0, 10.0), Share(5.0, 108.0, 16.0), 2) == pytest.approx(0.2)
    assert foreign_share(Share(0.0, 100.0, 10.0), Share(5.0, 105.0, 16.0), 2) == 0.0


def test_a_tree_is_everything_below_its_root() -> None:
    """A child that waits for its own, which computes; clock ticks that are not over do not count."""
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    spin = "import time\nwhile time.process_time() < 0.4: pass\nprint(end='x', flush=True)\ntime.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", program, spin], stdout=subprocess.PIPE, start_new_session=True
    ) as root:
        assert root.stdout is not None
        assert root.stdout.read(1) == b"x"
        assert tree_ticks(root.pid) * TICK_S >= 0.3
        os.killpg(root.pid, signal.SIGKILL)


def test_the_tokenizer_has_as_many_tokens_as_prompts_draw_from() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer) == NUM_TOKENS
    ids = list(range(FIRST_ID, NUM_TOKENS, 97))
    assert len(tokenizer.convert_ids_to_tokens(ids)) == len(ids)
    assert tokenizer.decode(tokenizer.encode("Straße, 日本")) == "Straße, 日本"


def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path, "float32", 1, 64, "64MiB", 1, 7)


async def test_a_child_answers_whatever_its_libraries_print(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
        "from peers_child import serve\n"
        "def run(prompts, num_output):\n"
        "    print('noise')\n"
        "    return {'tokens_per_s': len(prompts) * num_output, 'ttft_s': len(prompts[0]), 'itl_s': 0.5}\n"
        "serve(lambda: run)\n"
    )
    engine = ChildEngine("child", [sys.executable, "-u", str(script)], tmp_path)
    await engine.start(setting(tmp_path))
    assert await engine.run([[1, 2, 3]] * 4) == Figures(28, 3, 0.5)
    assert await engine.run([[1]]) == Figures(7, 1, 0.5)
    await engine.stop()
    assert "noise" in (tmp_path / "child.log").read_text()


async def test_a_child_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    engine = ChildEngine("child", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path)
    with pytest.raises(RuntimeError, match="exit code 3"):
        await engine.start(setting(tmp_path))
    await engine.stop()


def test_a_benchmark_that_is_told_to_end_ends_what_it_has_started(tmp_path: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from benchmarks.peers_engines import EngineProcess\n"
        "async def run():\n"
        "    engine = EngineProcess()\n"
        "    try:\n"
        "        await engine.spawn('sleep', '600', log=pathlib.Path(sys.argv[1]))\n"
        "        print(engine.pid, flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "    finally:\n"
        "        await engine.stop()\n"
        "asyncio.run(run())\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "log")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as benchmark:
        assert benchmark.stdout is not None
        pid = int(benchmark.stdout.readline())
        assert is_running(pid)
        benchmark.terminate()
        benchmark.wait(30)
    assert not is_running(pid)


def test_our_engine_generates_offline() -> None:
    folder, _ = stored_checkpoint(CheckpointShape())
    generate = load(str(folder), "float32", 1, 64, "64MiB")
    figures = [generate([[5, 6, 7, 8]] * 3, 4) for _ in range(2)]
    for found in figures:
        assert found["tokens_per_s"] > 0
        assert found["ttft_s"] > 0
        assert 0 < found["itl_s"] < found["ttft_s"] + 1


FAKE_VLLM = """#!PYTHON
import json, os, sys
from aiohttp import web

flags = dict(zip(sys.argv[3::1], sys.argv[4::1]))
print("a banner " * 20000)  # nobody reads it: the pipe must not fill

async def health(_request):
    return web.Response()

async def completions(request):
    body = await request.json()
    assert (body["model"], body["ignore_eos"], body["temperature"]) == (flags["--served-model-name"], True, 0)
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(body["max_tokens"] - int(os.environ.get("TOO_FEW", 0))):
        await response.write(b'data: {"choices": [{"text": "x"}]}\\n\\n')
    await response.write(b"data: [DONE]\\n\\n")
    return response

app = web.Application()
app.add_routes([web.get("/health", health), web.post("/v1/completions", completions)])
assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0-0"
web.run_app(app, port=int(flags["--port"]), print=None)
"""


async def test_a_server_is_started_asked_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(FAKE_VLLM.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    server = VllmServer(str(python), tmp_path)
    await server.start(setting(tmp_path))
    pid = server.pid
    assert pid is not None
    figures = await server.run([[5, 6]] * 3)
    assert figures.tokens_per_s > 0
    assert figures.ttft_s > 0
    await server.stop()
    assert not is_running(pid)
    monkeypatch.setenv("TOO_FEW", "1")
    await server.start(setting(tmp_path))
    with pytest.raises(RuntimeError, match="answers failed or ended early"):
        await server.run([[5, 6]])
    await server.stop()
