"""What a layer's kernels cost beside its products, and what choosing costs: Triton's against torch's, side by side.

    python -m benchmarks.fused_kernels --model FOLDER [--dtype bfloat16]

The sizes are the model's; nothing of it is loaded. Layers' operators are timed as they run in recorded steps: twenty
calls in a CUDA graph, so that starting them costs nothing; the share of the roof is what they must read and write, by
the bandwidth of a copy within the device's memory. Choosing is timed as it runs, from logits on the device to ids on
the host: a third of the rows greedy, the others with top-p or top-k. The two sides take turns; medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu_step import copy_roof
from benchmarks.harness import print_table
from benchmarks.on_device import name_of, parse, seconds
from services.worker.executor.step_graphs import CudaRecorder
from services.worker.fused.library import FusedKernels
from services.worker.memory.kv_cache import KVCache
from services.worker.models.operators import LayerOperators
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec, read_spec
from services.worker.models.weights import ParameterBuffer, buffer_bytes, layer_parts
from services.worker.sampling.draw import RowSampling
from services.worker.sampling.sampler import TokenSampler
from services.worker.sampling.scoring import Scoring

ROWS = (1, 16, 256, 4096)
CHOSEN_ROWS = (1, 16, 256)
CALLS = 20
ROUNDS = 30


def calls(
    operators: LayerOperators, scoring: Scoring, spec: ModelSpec, weights: ParameterBuffer, num_rows: int
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return by name what computes so many rows, and the bytes that it has to read and write."""
    device, dtype = weights.storage.device, weights.dtype
    size = dtype.itemsize * num_rows
    heads = torch.randn((num_rows, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim), device=device).to(dtype)
    hidden = torch.randn((num_rows, spec.hidden_size), device=device).to(dtype)
    places = torch.arange(num_rows, device=device)
    found: dict[str, tuple[Callable[[], object], int]] = {
        "norm": (lambda: operators.norm(hidden, weights, "mlp_norm"), 2 * size * spec.hidden_size),
        "heads": (lambda: operators.rotation(places, places)(0, heads, weights), 2 * size * heads[0].numel()),
    }
    if spec.gated_mlp:
        pair = torch.randn((num_rows, 2 * spec.intermediate_size), device=device).to(dtype)
        found["gate"] = (lambda: operators.gate(pair), 3 * size * spec.intermediate_size)
    if num_rows in CHOSEN_ROWS:
        products = torch.randn((num_rows, spec.vocab_size), device=device).to(dtype)
        found["largest logits"] = (
            lambda: scoring.largest(products, None),
            (dtype.itemsize + 4) * num_rows * spec.vocab_size,
        )
    return found


def turns(device: torch.device, actions: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median time of each action; they take turns three times."""
    taken = np.array([[seconds(device, action, ROUNDS // 3) for action in actions] for _ in range(3)])
    medians: list[float] = np.median(taken, axis=0).tolist()
    return medians


def recorded(device: torch.device, call: Callable[[], object]) -> Callable[[], None]:
    """Return what starts `CALLS` calls at once, if the device can."""

    def compute() -> None:
        for _ in range(CALLS):
            call()

    return CudaRecorder(device).record(compute) if device.type == "cuda" else compute


def operators_table(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> list[tuple[str, ...]]:
    """Return rows of a table of the layers' operators."""
    roof = copy_roof(device, ROUNDS)
    parts = layer_parts(spec, 0)
    weights = ParameterBuffer(parts, dtype, torch.zeros(buffer_bytes(parts, dtype), dtype=torch.uint8, device=device))
    cache = KVCache(spec, -(-max(ROWS) // 16), 16, dtype, device)
    rope = RopeTable(spec.rope, spec.rotary_dim, max(ROWS), dtype, device)
    fused = FusedKernels()
    sides = ((LayerOperators(spec, rope, cache), Scoring()), (fused.operators(spec, rope, cache), fused.scoring()))
    table: list[tuple[str, ...]] = []
    for num_rows in ROWS:
        theirs, ours = (calls(*side, spec, weights, num_rows) for side in sides)
        for name, (call, num_bytes) in ours.items():
            with torch.inference_mode():
                starts = [recorded(device, each) for each in (theirs[name][0], call)]
                before, after = (each / CALLS for each in turns(device, starts))
            share = f"{num_bytes / after / roof:.0%}"
            table.append(
                (name, str(num_rows), f"{before * 1e6:.1f}", f"{after * 1e6:.1f}", f"{before / after:.1f}", share)
            )
    return table


def choosing_table(spec: ModelSpec, device: torch.device) -> list[tuple[str, ...]]:
    """Return rows of a table of choosing."""
    table: list[tuple[str, ...]] = []
    for num_rows in CHOSEN_ROWS:
        rows = np.arange(num_rows)
        sampling = RowSampling(
            temperature=np.array([0.8, 1.0, 0.0])[rows % 3],
            top_p=np.where(rows % 3 == 0, 0.9, 1.0),
            top_k=np.where(rows % 3 == 1, 40, 0),
            min_p=np.zeros(num_rows),
            seed=rows,
        )
        logits = torch.randn((num_rows, spec.vocab_size), device=device) * 3
        samplers = TokenSampler(), TokenSampler(choose=FusedKernels().choose)
        with torch.inference_mode():
            before, after = turns(device, [partial(each.sample, logits, sampling, rows) for each in samplers])
        table.append((str(num_rows), f"{before * 1e6:.0f}", f"{after * 1e6:.0f}", f"{before / after:.1f}"))
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in Hugging Face format")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    arguments, device = parse(parser)
    if device.type != "cuda":
        parser.error("Triton's kernels need a CUDA device; tests/unit/worker/fused tries them without one")
    spec = read_spec(arguments.model)
    print(f"{name_of(device)}; torch {torch.__version__}; {arguments.dtype}")
    table = operators_table(spec, device, getattr(torch, arguments.dtype))
    print_table("Between products", ("what", "rows", "torch, us", "fused, us", "ratio", "of the roof"), table)
    print_table("Choosing", ("rows", "torch, us", "fused, us", "ratio"), choosing_table(spec, device))


if __name__ == "__main__":
    main()
