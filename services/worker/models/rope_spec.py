"""The rotary embedding that config.json asks for, as data.

Two kinds depend on the length of the sequence at hand. Here a sequence's angles never change, so both are served up to
the length at which they would: there the text equals the reference's. `dynamic` keeps the plain frequencies up to
`max_position_embeddings`; `longrope` uses its short factors up to `original_max_position_embeddings`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from services.worker.models.config_json import ConfigReader
from services.worker.models.families import Family
from shared.errors import StartupError
from shared.model_files import MAX_COUNT

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]

_SUPPORTED = "default, linear, dynamic, llama3, yarn, longrope"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base and how its frequencies are scaled for a longer context."""

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    """Scale of a longer context; `linear`, `llama3`, `yarn`."""
    low_freq_factor: float = 1.0
    """`llama3`: waves longer than original_max_positions / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: waves shorter than original_max_positions / this stay."""
    original_max_positions: int = 0
    """`llama3`, `yarn`: context of the first training."""
    beta_fast: float = 32.0
    """`yarn`: dimensions that turn more often than this in the first context stay."""
    beta_slow: float = 1.0
    """`yarn`: dimensions that turn less often than this in the first context are divided by `factor`."""
    truncate: bool = True
    """`yarn`: the two borders are rounded to whole dimensions."""
    factors: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency."""
    attention_factor: float = 1.0
    """`yarn`, `longrope`: cos and sin are multiplied by this."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """How positions enter the heads, and how many positions that serves exactly."""

    rope: RopeSpec
    rotary_dim: int
    """First dimensions of each head that are turned."""
    max_positions: int


def read_rotation(reader: ConfigReader, family: Family, head_dim: int, max_positions: int) -> Rotation:
    """Read `rope_parameters` (transformers 5), or `rope_scaling` with `rope_theta` (before).

    Args:
        reader: of config.json.
        family: of the model.
        head_dim: of the model.
        max_positions: `max_position_embeddings`.

    Raises:
        StartupError: the kind of rotary embedding is not supported, or its parameters are broken.
    """
    values = reader.config.get("rope_scaling") or reader.config.get("rope_parameters") or {}
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise reader.error("rope_parameters", "differ from layer to layer, which is not supported")
    if values.get("mrope_section"):
        raise StartupError("multimodal rotary embedding (mrope_section) is not supported", "Choose a text model")
    original = reader.config.get("original_max_position_embeddings")
    given = {} if original is None else {"original_max_position_embeddings": original}
    rope = ConfigReader({**values, **given}, prefix="rope parameter ")
    rotary_dim = _rotary_dim(reader, rope, family, head_dim)
    theta = rope.above_zero("rope_theta", reader.above_zero("rope_theta", 10_000.0))
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    match family.rope_names.get(kind, kind):
        case "default" | "dynamic":
            return Rotation(RopeSpec(theta=theta), rotary_dim, max_positions)
        case "linear":
            return Rotation(RopeSpec("linear", theta, rope.above_zero("factor")), rotary_dim, max_positions)
        case "llama3":
            return Rotation(_llama3(rope, theta, max_positions), rotary_dim, max_positions)
        case "yarn":
            return _yarn(rope, theta, rotary_dim, max_positions)
        case "longrope":
            return _longrope(rope, theta, rotary_dim, max_positions)
    raise StartupError(
        f"rotary embedding of type {kind!r} is not supported", f"Supported: {_SUPPORTED}", "unsupported_model"
    )


def _rotary_dim(reader: ConfigReader, rope: ConfigReader, family: Family, head_dim: int) -> int:
    name = "partial_rotary_factor"
    partial = rope.above_zero(name, reader.above_zero(name, 1.0))
    if partial != 1.0 and not family.partial_rotary:
        raise StartupError(f"partial rotary embedding ({name}) of {family.model_type} is not supported", "Use another")
    rotary_dim = int(head_dim * min(partial, 2.0))  # 2: too many
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise reader.error(
            "head_dim", f"is {head_dim}; the rotary embedding turns {rotary_dim}, not an even part of it"
        )
    return rotary_dim


def _llama3(rope: ConfigReader, theta: float, max_positions: int) -> RopeSpec:
    low, high = rope.above_zero("low_freq_factor"), rope.above_zero("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"is {high}, must be above low_freq_factor, {low}")
    original = rope.positive("original_max_position_embeddings", max_positions)
    return RopeSpec("llama3", theta, rope.above_zero("factor"), low, high, original)


def _yarn(rope: ConfigReader, theta: float, rotary_dim: int, max_positions: int) -> Rotation:
    """Source: YaRN (Peng et al. 2023), sections 3.2 to 3.4; borders and scale as transformers computes them."""
    if theta <= 1.0:
        raise rope.error("rope_theta", f"is {theta}, must be above 1")
    factor = rope.above_zero("factor")
    name = "original_max_position_embeddings"
    original = rope.positive(name, max_positions)
    mscale, mscale_all_dim = _not_negative(rope, "mscale"), _not_negative(rope, "mscale_all_dim")
    scale = _yarn_scale(factor, 1.0)
    if mscale and mscale_all_dim:
        scale = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    spec = RopeSpec(
        "yarn",
        theta,
        factor,
        original_max_positions=original,
        beta_fast=_not_negative(rope, "beta_fast") or 32.0,
        beta_slow=_not_negative(rope, "beta_slow") or 1.0,
        truncate=rope.get("truncate", bool, default=True),
        attention_factor=rope.get("attention_factor", float, scale),
    )
    stated = rope.config.get(name) is not None
    longer = int(min(original * factor, MAX_COUNT)) if stated else 0
    return Rotation(spec, rotary_dim, max(max_positions, longer))


def _not_negative(rope: ConfigReader, name: str) -> float:
    """Return a number, 0 where there is none."""
    value = rope.get(name, float, 0.0)
    if value < 0.0:
        raise rope.error(name, f"is {value}, must not be negative")
    return value


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _longrope(rope: ConfigReader, theta: float, rotary_dim: int, max_positions: int) -> Rotation:
    """Source: LongRoPE (Ding et al. 2024), section 3; the scale of attention as transformers computes it."""
    original = rope.positive("original_max_position_embeddings", max_positions)
    short = rope.numbers("short_factor", rotary_dim // 2)
    rope.numbers("long_factor", rotary_dim // 2)
    factor = rope.above_zero("factor", max_positions / original)
    scale = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
    attention_factor = rope.get("attention_factor", float, scale)
    spec = RopeSpec("longrope", theta, factors=short, attention_factor=attention_factor)
    return Rotation(spec, rotary_dim, min(max_positions, original))
