"""What common models take, and how many contexts cards hold beside: `sluice ls --sizes`, the table of docs/models.md.

All figures are estimates by published shapes; a worker measures its workspace when it starts.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from cli.console import table
from shared.model_sizes import CPU_BYTES_PER_S, USUAL_CONTEXT, CheckpointSizes
from shared.sizing import CARD_SHARE
from sim.catalog.facts import CatalogModel, models

CARDS_GB: Final = (8, 16, 24, 48, 80)
"""Memory of usual cards, in 10⁹ bytes."""
DTYPE: Final = "bfloat16"
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class ModelFit:
    """What one model takes; but for `float32_bytes` in bfloat16."""

    name: str
    context: int
    """Tokens: `USUAL_CONTEXT`, or all that the model was made for."""
    parameter_bytes: int
    float32_bytes: int
    """The parameters in float32."""
    kv_bytes: int
    """Of 1 000 tokens."""
    least_bytes: int
    """Budget of a worker that serves one such context."""
    contexts: dict[int, int]
    """How many at a time a card holds, by its memory in GB."""
    cpu_tokens_per_s: float
    """Of one reader, at most, by the bandwidth of memory alone."""


def fit_of(sizes: CheckpointSizes) -> ModelFit:
    """Return what a model takes."""
    context = min(USUAL_CONTEXT, sizes.max_positions)
    return ModelFit(
        name=sizes.name,
        context=context,
        parameter_bytes=sizes.parameter_bytes(DTYPE),
        float32_bytes=sizes.parameter_bytes("float32"),
        kv_bytes=1000 * sizes.kv_token_bytes(DTYPE),
        least_bytes=sizes.least_bytes(DTYPE, context),
        contexts={gb: sizes.kv_tokens(DTYPE, int(CARD_SHARE * gb * 1e9)) // context for gb in CARDS_GB},
        cpu_tokens_per_s=round(CPU_BYTES_PER_S / sizes.parameter_bytes(DTYPE), 1),
    )


def run_sizes(*, as_json: bool) -> str:
    """Return what to print: the models of the catalogue, the smallest first."""
    fits = sorted(
        (fit_of(sizes_of_common(name, model)) for name, model in models().items()), key=lambda fit: fit.parameter_bytes
    )
    if as_json:
        return json.dumps([asdict(fit) for fit in fits])
    cards = [f"{gb} GB" for gb in CARDS_GB]
    head = ("MODEL", "BFLOAT16", "FLOAT32", "KV/1K", "CONTEXT", "LEAST", *cards, "CPU TOK/S")
    return table([head, *map(_row, fits)])


def _row(fit: ModelFit) -> tuple[str, ...]:
    gib = [f"{num_bytes / _GIB:.1f} GiB" for num_bytes in (fit.parameter_bytes, fit.float32_bytes)]
    counts = [str(count) if count else "-" for count in fit.contexts.values()]
    speed = f"{fit.cpu_tokens_per_s:.0f}" if fit.cpu_tokens_per_s >= 10 else f"{fit.cpu_tokens_per_s:.1f}"
    kv, least = f"{fit.kv_bytes / 2**20:.0f} MiB", f"{fit.least_bytes / _GIB:.1f} GiB"
    return (fit.name, *gib, kv, str(fit.context), least, *counts, speed)


def sizes_of_common(name: str, model: CatalogModel) -> CheckpointSizes:
    """Return what a model of the catalogue is counted by."""
    return CheckpointSizes(
        name=name,
        num_parameters=model.num_parameters,
        num_layers=model.num_layers,
        kv_values=model.kv_bytes_per_token // model.bytes_per_kv_value,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        max_positions=model.max_positions,
        is_served=True,
    )
