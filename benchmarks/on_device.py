"""What benchmarks of a loaded model have in common: which model, and where it runs."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import machine
from services.worker.executor.first_look import RunnerSettings


def model_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of a model and its device; the description is shown as it is."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint in Hugging Face format")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--no-graphs", action="store_true", help="start every kernel of a decode by itself")
    parser.add_argument("--no-fused", action="store_true", help="torch's operators between the products")
    parser.add_argument("--memory-gib", type=float, default=60.0, help="for parameters and KV")
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, torch.device]:
    """Return what was asked for; without the device it ends, and says what to do."""
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu tries the benchmark out")
    return arguments, device


def settings_of(arguments: argparse.Namespace, **others: Any) -> RunnerSettings:
    """Return a runner's settings: what `model_parser` was told, and others."""
    return RunnerSettings(
        arguments.model,
        device=arguments.device,
        dtype=arguments.dtype,
        memory_bytes=int(arguments.memory_gib * 2**30),
        kernels=arguments.kernels,
        graphs=not arguments.no_graphs,
        fused=not arguments.no_fused,
        **others,
    )


def name_of(device: torch.device) -> str:
    """Return the name of a GPU, or of this machine."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else machine()


def seconds(device: torch.device, action: Callable[[], object], rounds: int) -> float:
    """Return the median time of an action, all that it started on the device included; the first two do not count."""
    taken = []
    for _ in range(rounds + 2):
        began_s = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - began_s)
    return median(taken[2:])
