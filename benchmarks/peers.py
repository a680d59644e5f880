"""This engine beside vLLM, transformers and llama.cpp: one interleaved run on this machine's CPU.

Every engine loads the same random checkpoint (`benchmarks.peers_model`) and gets the same load: N prompts of 128 random
ids at once, 128 tokens each, greedy, past the end token; prefix caching finds nothing, since the prompts are new each
time. Engines of one dtype are up together, and take turns, so that all meet the same machine; a run notes the share of
the machine that others used meanwhile, waiting engines included. The best of the repeats is shown, and their median.

Peers are no dependencies: each is used if the Python or the program of its environment is named, else skipped.

    python -m benchmarks.peers --folder DIR [--vllm-python P] [--hf-python P] [--llama-bench B --gguf-python P]
                               [--shape small|qwen2-0.5b] [--dtypes float32 bfloat16] [--batches 1 8] [--repeats 3]

TTFT and ITL are means over the requests, ITL (last − first)/(n − 1). Of transformers TTFT is the time of a call for one
token; of llama.cpp it is the whole prompt pass, and neither samples nor serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import machine, print_table
from benchmarks.peers_engines import ChildEngine, Engine, Figures, LlamaBench, Setting
from benchmarks.peers_load import Share, foreign_share, wait_idle
from benchmarks.peers_model import FIRST_ID, LIMITS, NUM_TOKENS, make_checkpoint
from benchmarks.peers_servers import SluiceServer, VllmServer

CHILD = ("-P", str(Path(__file__).with_name("peers_child.py")))
"""-P: files beside it are not to be taken for packages of the same name."""
OURS = ("sluice-http", "sluice-offline")


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement."""

    engine: str
    dtype: str
    batch: int
    figures: Figures
    foreign_ratio: float
    """Share of the machine that neither this engine nor the client used."""


def make_engines(chosen: argparse.Namespace) -> list[Engine]:
    """Return the engines that can run here; says which cannot."""
    folder: Path = chosen.folder
    offline = [sys.executable, "-m", "benchmarks.peers_offline"]
    engines: list[Engine] = [SluiceServer(folder), ChildEngine("sluice-offline", offline, folder, has_memory=True)]
    if chosen.vllm_python:
        engines += [
            VllmServer(chosen.vllm_python, folder),
            ChildEngine("vllm-offline", [chosen.vllm_python, *CHILD, "vllm"], folder),
        ]
    if chosen.hf_python:
        engines.append(ChildEngine("transformers", [chosen.hf_python, *CHILD, "hf"], folder))
    if chosen.llama_bench:
        engines.append(LlamaBench(chosen.llama_bench, chosen.gguf_python or sys.executable, folder))
    names = {engine.name for engine in engines}
    for name, flag in (("vllm-http", "--vllm-python"), ("transformers", "--hf-python"), ("llama.cpp", "--llama-bench")):
        if name not in names:
            print(f"skipped: {name}; name it with {flag}")
    return [engine for engine in engines if not chosen.engines or engine.name in chosen.engines]


def draw_prompts(rng: np.random.Generator, batch: int, num_prompt: int) -> list[list[int]]:
    """Return prompts of random ids."""
    prompts: list[list[int]] = rng.integers(FIRST_ID, NUM_TOKENS, (batch, num_prompt)).tolist()
    return prompts


async def measure(engine: Engine, dtype: str, prompts: list[list[int]]) -> Run:
    """Return one measured run."""
    before = Share.take(engine.pid)
    figures = await engine.run(prompts)
    return Run(engine.name, dtype, len(prompts), figures, foreign_share(before, Share.take(engine.pid)))


async def measure_dtype(engines: list[Engine], chosen: argparse.Namespace, dtype: str) -> list[Run]:
    """Return the runs of all engines that start, in turns."""
    limits = LIMITS[chosen.shape]
    setting = Setting(
        checkpoint=chosen.folder / chosen.shape,
        dtype=dtype,
        threads=chosen.threads,
        max_len=chosen.prompt_len + chosen.output_len + 256,
        memory=limits.memory,
        kv_gib=limits.kv_gib,
        num_output=chosen.output_len,
    )
    rng = np.random.default_rng(1)
    runs: list[Run] = []
    up: list[Engine] = []
    try:
        for engine in engines:
            if await _start(engine, setting):
                up.append(engine)
                await engine.run(draw_prompts(rng, 8, chosen.prompt_len))
        for repeat in range(chosen.repeats):
            for batch in chosen.batches:
                for engine in up[repeat % len(up) :] + up[: repeat % len(up)]:
                    await wait_idle()
                    run = await measure(engine, dtype, draw_prompts(rng, batch, chosen.prompt_len))
                    runs.append(run)
                    print(f"{dtype} {batch:3} {engine.name:15} {cell(run)}", flush=True)
    finally:
        for engine in engines:
            await engine.stop()
    return runs


async def _start(engine: Engine, setting: Setting) -> bool:
    began_s = time.perf_counter()
    try:
        await engine.start(setting)
    except (RuntimeError, OSError, TimeoutError) as error:
        print(f"skipped: {engine.name} does not start: {error}")
        await engine.stop()
        return False
    print(f"{engine.name} is up after {time.perf_counter() - began_s:.0f} s", flush=True)
    return True


def cell(run: Run) -> str:
    """Return a run as the tables show it: tokens/s, TTFT ms, ITL ms, and the others' share if it matters."""
    figures = run.figures
    others = f" !{run.foreign_ratio:.2f}" if run.foreign_ratio > 0.05 else ""
    return f"{figures.tokens_per_s:.0f}, {1e3 * figures.ttft_s:.0f}, {1e3 * figures.itl_s:.1f}{others}"


def best(runs: list[Run], engine: str, batch: int) -> Run | None:
    """Return the fastest of the repeats."""
    found = [run for run in runs if (run.engine, run.batch) == (engine, batch)]
    return max(found, key=lambda run: run.figures.tokens_per_s, default=None)


def table_rows(runs: list[Run], batches: list[int]) -> list[list[str]]:
    """Return a row per engine: the best run of each batch size, and behind it the median of the repeats' tokens/s."""
    rows = []
    for engine in dict.fromkeys(run.engine for run in runs):
        cells = []
        for batch in batches:
            top = best(runs, engine, batch)
            rates = [run.figures.tokens_per_s for run in runs if (run.engine, run.batch) == (engine, batch)]
            cells.append(f"{cell(top)} ({np.median(rates):.0f})" if top is not None else "-")
        rows.append([engine, *cells])
    return rows


def ratio_rows(runs: list[Run], batches: list[int]) -> list[list[str]]:
    """Return a row per pair of ours and a peer: our best tokens/s over its best."""
    rows = []
    names = list(dict.fromkeys(run.engine for run in runs))
    for ours in (name for name in names if name in OURS):
        for peer in (name for name in names if name not in OURS):
            pairs = [(best(runs, ours, batch), best(runs, peer, batch)) for batch in batches]
            ratios = [
                f"{one.figures.tokens_per_s / other.figures.tokens_per_s:.2f}" if one and other else "-"
                for one, other in pairs
            ]
            rows.append([f"{ours} / {peer}", *ratios])
    return rows


async def main() -> None:
    """Run the comparison that the command line asks for."""
    chosen = _arguments()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    make_checkpoint(chosen.shape, chosen.folder / chosen.shape)
    engines = make_engines(chosen)
    head = ["engine", *(f"batch {batch}" for batch in chosen.batches)]
    every: list[Run] = []
    for dtype in chosen.dtypes:
        runs = await measure_dtype(engines, chosen, dtype)
        every += runs
        title = (
            f"{chosen.shape}, {dtype}, {chosen.threads} threads ({machine()}): best tokens/s, TTFT ms, ITL ms (median)"
        )
        print_table(title, head, table_rows(runs, chosen.batches))
        print_table("Best tokens/s, ours over theirs", ["", *head[1:]], ratio_rows(runs, chosen.batches))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(run) for run in every], indent=1) + "\n")
    print("\n! marks a run during which others used more than 5 % of the machine.")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints, converted files and logs")
    parser.add_argument("--shape", choices=sorted(LIMITS), default="small")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--engines", nargs="+", default=[], help="only these, by their names in the tables")
    parser.add_argument("--vllm-python", default="", help="interpreter of an environment with vllm")
    parser.add_argument("--hf-python", default="", help="interpreter of an environment with transformers")
    parser.add_argument("--llama-bench", default="", help="path to llama-batched-bench")
    parser.add_argument("--gguf-python", default="", help="interpreter with gguf and safetensors")
    parser.add_argument("--json", type=Path, help="write every run here")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
