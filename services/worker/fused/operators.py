"""A model's operators and scoring by Triton's kernels: one where torch takes three to ten. For devices of CUDA."""

from __future__ import annotations

import torch
from torch.nn import functional

from services.worker.fused import choice_kernels, launching, layer_kernels
from services.worker.fused.launching import block_of, warps_of
from services.worker.memory.kv_cache import KVCache
from services.worker.models.operators import LayerOperators, Rotation
from services.worker.models.rope import RopeTable
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import ParameterBuffer
from services.worker.sampling.scoring import Scoring

GATE_BLOCK = 1024
"""Numbers of one program."""
TURN_ELEMENTS = 1024
"""Numbers of the heads of one program, about."""
LOGITS_BLOCK = 8192
"""Logits of a row that are looked at at a time."""


class FusedOperators(LayerOperators):
    """Operators of which some are kernels of ours.

    Products with a matrix add to the hidden states in place, and round the sum once, where torch's operators round the
    product too. What takes one kernel anyway is torch's.

    Args:
        spec: the model.
        rope: angles of every position that may occur.
        cache: for keys and values.
    """

    def __init__(self, spec: ModelSpec, rope: RopeTable, cache: KVCache) -> None:
        super().__init__(spec, rope, cache)
        self._pools = cache
        rest = spec.head_dim - spec.rotary_dim
        self._rotation_constants = {
            "NUM_HEADS": spec.num_heads,
            "NUM_KV_HEADS": spec.num_kv_heads,
            "HEAD_DIM": spec.head_dim,
            "ROTARY_DIM": spec.rotary_dim,
            "HAS_NORM": spec.head_norm,
            "HEADS_BLOCK": max(TURN_ELEMENTS // block_of(spec.head_dim), 1),
            "HALF_BLOCK": block_of(max(spec.rotary_dim // 2, 1)),
            "REST_BLOCK": block_of(rest) if rest else 0,
        }

    def norm(self, hidden: torch.Tensor, weights: ParameterBuffer, name: str) -> torch.Tensor:
        """Return the hidden states normalised; see `LayerOperators`."""
        weight, bias = weights.get(name), weights.get(f"{name}_bias")
        is_rms, width = self._spec.norm_kind == "rms", hidden.shape[-1]
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        block = block_of(width)
        launching.launch(
            layer_kernels.norm_rows,
            (hidden.shape[0],),
            hidden,
            hidden if weight is None else weight,
            hidden if bias is None else bias,
            out,
            self._spec.norm_eps,
            WIDTH=width,
            IS_RMS=is_rms,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None and not is_rms,
            BLOCK=block,
            num_warps=warps_of(block),
        )
        return out

    def rotation(self, positions: torch.Tensor, slots: torch.Tensor) -> Rotation:
        """Return what takes the heads of a step's layers; see `LayerOperators`."""
        spec, cache, rope, constants = self._spec, self._pools, self._rope, self._rotation_constants
        num_programs = -(-(spec.num_heads + 2 * spec.num_kv_heads) // constants["HEADS_BLOCK"])

        def rotate(layer: int, heads: torch.Tensor, weights: ParameterBuffer) -> torch.Tensor:
            assert heads.is_contiguous()
            places = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()
            launching.launch(
                layer_kernels.rotate_heads,
                (heads.shape[0], num_programs),
                heads,
                positions,
                slots,
                rope.cos,
                rope.sin,
                weights["q_norm"] if spec.head_norm else heads,
                weights["k_norm"] if spec.head_norm else heads,
                *places,
                spec.norm_eps,
                **constants,
                IS_ALIGNED=not any(place % 16 for place in places),
                num_warps=2,
            )
            return heads[:, : spec.num_heads]

        return rotate

    def gate(self, pair: torch.Tensor) -> torch.Tensor:
        """Return the gated activation; see `LayerOperators`."""
        width = pair.shape[1] // 2
        out = pair.new_empty((pair.shape[0], width))
        grid = (pair.shape[0], -(-width // GATE_BLOCK))
        activation = self._spec.activation
        launching.launch(layer_kernels.gate_rows, grid, pair, out, WIDTH=width, ACTIVATION=activation, BLOCK=GATE_BLOCK)
        return out

    def add_product(
        self, hidden: torch.Tensor, inputs: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the sum, in place of `hidden` if there is no bias; see `LayerOperators`."""
        if bias is not None:
            return functional.linear(inputs, matrix, bias).add_(hidden)
        return hidden.addmm_(inputs, matrix.t())


class FusedScoring(Scoring):
    """Scoring by kernels of ours."""

    def finite(self, hidden: torch.Tensor, last: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
        """Look at hidden states; see `Scoring`."""
        finite = torch.empty(len(last), dtype=torch.bool, device=hidden.device) if into is None else into
        width = hidden.shape[1]
        block = block_of(width)
        launching.launch(
            choice_kernels.finite_rows,
            (len(last),),
            hidden,
            last,
            finite,
            WIDTH=width,
            BLOCK=block,
            num_warps=warps_of(block),
        )
        return finite

    def largest(
        self, products: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look at logits; see `Scoring`."""
        if into is None:
            ids = torch.empty(len(products), dtype=torch.int64, device=products.device)
            into = torch.empty(products.shape, dtype=torch.float32, device=products.device), ids
        launching.launch(
            choice_kernels.largest_rows, (len(products),), products, *into, **row_constants(products.shape[1])
        )
        return into


def row_constants(vocab_size: int) -> dict[str, int]:
    """Return the constants of a kernel that goes through rows of logits."""
    block = min(block_of(vocab_size), LOGITS_BLOCK)
    return {"VOCAB": vocab_size, "BLOCK": block, "num_warps": warps_of(block)}
