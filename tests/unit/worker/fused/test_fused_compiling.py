"""Triton's kernels are compiled for GPUs with nothing left over, once for a model. Needs no GPU; none is started."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.worker.fused import choice_kernels, layer_kernels
from services.worker.fused.launching import OPTIONS

LLAMA_8B = {
    "NUM_HEADS": 32,
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "ROTARY_DIM": 128,
    "HEADS_BLOCK": 8,
    "IS_ALIGNED": True,
}
PHI_3 = {"NUM_HEADS": 32, "NUM_KV_HEADS": 32, "HEAD_DIM": 96, "ROTARY_DIM": 72, "HEADS_BLOCK": 8, "IS_ALIGNED": False}
ROWS = {"VOCAB": 128_256, "BLOCK": 8192}
NORM = {"WIDTH": 4096, "BLOCK": 4096}
WIDE_NORM = {"WIDTH": 8192, "BLOCK": 8192}
COMPILED: list[tuple[Any, dict[str, Any], int]] = [
    (layer_kernels.norm_rows, {**NORM, "IS_RMS": True, "HAS_WEIGHT": True, "HAS_BIAS": False}, 8),
    (layer_kernels.norm_rows, {**WIDE_NORM, "IS_RMS": False, "HAS_WEIGHT": True, "HAS_BIAS": True}, 16),
    (layer_kernels.rotate_heads, {**LLAMA_8B, "HAS_NORM": False, "HALF_BLOCK": 64, "REST_BLOCK": 0}, 2),
    (layer_kernels.rotate_heads, {**LLAMA_8B, "HAS_NORM": True, "HALF_BLOCK": 64, "REST_BLOCK": 0}, 2),
    (layer_kernels.rotate_heads, {**PHI_3, "HAS_NORM": False, "HALF_BLOCK": 64, "REST_BLOCK": 32}, 2),
    (layer_kernels.gate_rows, {"WIDTH": 14_336, "BLOCK": 1024, "ACTIVATION": "silu"}, 4),
    (layer_kernels.gate_rows, {"WIDTH": 14_336, "BLOCK": 1024, "ACTIVATION": "gelu"}, 4),
    (layer_kernels.gate_rows, {"WIDTH": 14_336, "BLOCK": 1024, "ACTIVATION": "gelu_tanh"}, 4),
    (choice_kernels.finite_rows, NORM, 8),
    (choice_kernels.largest_rows, ROWS, 16),
    (choice_kernels.draw_rows, ROWS, 16),
]
TYPES = {
    "positions": "*i64",
    "slots": "*i64",
    "last": "*i64",
    "ids": "*i64",
    "finite": "*i1",
    "eps": "fp32",
    "logits": "*fp32",
    "parameters": "*fp64",
    "num_rows": "i32",
}
"""Of what is not in the model's type."""


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("kernel", "constants", "num_warps"),
    COMPILED,
    ids=[f"{i}-{each[0].fn.__name__}" for i, each in enumerate(COMPILED)],
)
def test_they_are_compiled_for_gpus_and_keep_all_numbers_in_registers(
    kernel: Any, constants: dict[str, Any], num_warps: int, capability: int, tmp_path: Path
) -> None:
    """By the compiler that a GPU machine has, with the sizes of models of 8 G parameters; none is started here."""
    types = {name: "constexpr" if name in constants else TYPES.get(name, "*bf16") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(types) if types[name].startswith("*")}
    source = ASTSource(kernel, types, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={**OPTIONS, "num_warps": num_warps}
    )
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = shutil.which("cuobjdump") or str(Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump")
    command = [tool, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(each.split(":") for line in said.splitlines() if "REG:" in line for each in line.split())
    assert (usage["LOCAL"], usage["STACK"]) == ("0", "0")
    assert int(usage["REG"]) * num_warps * 32 <= 65_536, "one program takes more registers than a processor has"


def test_no_step_makes_a_kernel_be_compiled_anew() -> None:
    """A list of a step begins anywhere in its buffer, and has any length: neither may count."""
    free = {
        layer_kernels.rotate_heads: {"positions", "slots", "keys", "values"},
        choice_kernels.finite_rows: {"last", "finite"},
        choice_kernels.largest_rows: {"ids"},
        choice_kernels.draw_rows: {"ids", "num_rows"},
    }
    for kernel, names in free.items():
        found = {p.name for p in kernel.params if p.do_not_specialize or p.do_not_specialize_on_alignment}
        assert found == names
