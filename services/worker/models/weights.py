"""Which tensors a model has, where they come from in the checkpoint, and one buffer per layer that holds them.

Every layer's parameters lie in one flat buffer, so that a memory pool can own, drop and restore a layer as one range:

    layer buffer: | qkv | output | gate_up or up | down | norms | biases |   each part 64-byte aligned
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from services.worker.models.families import FAMILIES
from services.worker.models.spec import ModelSpec
from shared.layers import LayerRange

if TYPE_CHECKING:
    import torch  # what fits is judged before it is loaded, which takes seconds

ALIGN_BYTES = 64
_FIRST_STAGE = ("embedding", "positions", "project_in")
_LAST_STAGE = ("norm", "norm_bias", "head", "project_out")


class NumberType(Protocol):
    """A `torch.dtype`, as far as sizes depend on it."""

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint, and the rows of the part that it fills."""

    name: str
    shape: tuple[int, ...]
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the decoder: one or several of the checkpoint, stacked by rows."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]

    @property
    def numel(self) -> int:
        """Elements of the part."""
        return prod(self.shape)


def _part(name: str, tensors: tuple[str, ...], rows: tuple[int, ...], width: int | None = None) -> Part:
    """Return a part that stacks tensors by rows.

    Args:
        name: of the part.
        tensors: in the checkpoint; one for each entry of `rows`, or a single one that has them all.
        rows: of each tensor.
        width: of each row; None: a row is one number.
    """
    if len(tensors) == 1:
        rows = (sum(rows),)
    tail = () if width is None else (width,)
    firsts = [sum(rows[:i]) for i in range(len(rows))]
    sources = [Source(*entry) for entry in zip(tensors, ((count, *tail) for count in rows), firsts, strict=True)]
    return Part(name, (sum(rows), *tail), tuple(sources))


def _named(prefix: str, names: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    return tuple(prefix + name + suffix for name in names)


def layer_parts(spec: ModelSpec, layer: int) -> tuple[Part, ...]:
    """Return the parts of one layer (numbered in the whole model), in the order of its buffer."""
    names = FAMILIES[spec.architecture].names
    prefix = f"{names.layers}.{layer}."
    hidden, inner = spec.hidden_size, spec.intermediate_size
    heads = (spec.q_size, spec.kv_size, spec.kv_size)
    up, ups = ("gate_up", (inner, inner)) if spec.gated_mlp else ("up", (inner,))
    matrices = (
        ("qkv", names.qkv, heads, hidden, spec.qkv_bias),
        ("output", (names.output,), (hidden,), spec.q_size, spec.output_bias),
        (up, names.up, ups, hidden, spec.mlp_bias),
        ("down", (names.down,), (hidden,), inner, spec.mlp_bias),
    )
    parts = [_part(name, _named(prefix, tensors, ".weight"), rows, width) for name, tensors, rows, width, _ in matrices]
    parts.extend(_norm_parts(spec, "attention_norm", prefix + names.attention_norm))
    parts.extend(_norm_parts(spec, "mlp_norm", prefix + names.mlp_norm))
    for name, tensors, rows, _, has_bias in matrices:
        if has_bias:
            parts.append(_part(f"{name}_bias", _named(prefix, tensors, ".bias"), rows))
    if spec.head_norm:
        parts.append(_part("q_norm", (f"{prefix}{names.q_norm}.weight",), (spec.head_dim,)))
        parts.append(_part("k_norm", (f"{prefix}{names.k_norm}.weight",), (spec.head_dim,)))
    return tuple(parts)


def _norm_parts(spec: ModelSpec, name: str, tensor: str) -> Iterator[Part]:
    if spec.norm_weight:
        yield _part(name, (f"{tensor}.weight",), (spec.hidden_size,))
    if spec.norm_bias:
        yield _part(f"{name}_bias", (f"{tensor}.bias",), (spec.hidden_size,))


def outer_parts(spec: ModelSpec) -> tuple[Part, ...]:
    """Return the parts outside the layers, in the order of their buffer.

    What only the first layer's stage needs comes first, what only the last one's needs comes last, see `outer_split`:

        | positions | project_in | embedding | norm | head | project_out |   those that the model has
    """
    names = FAMILIES[spec.architecture].names
    hidden, width = spec.hidden_size, spec.embedding_size or spec.hidden_size
    parts = []
    if spec.position_kind == "learned":
        rows = spec.max_positions + spec.position_offset
        parts.append(_part("positions", (f"{names.positions}.weight",), (rows,), hidden))
    if spec.embedding_size is not None:
        parts.append(_part("project_in", (f"{names.project_in}.weight",), (hidden,), width))
    parts.append(_part("embedding", (f"{names.embedding}.weight",), (spec.vocab_size,), width))
    if spec.final_norm:
        parts.extend(_norm_parts(spec, "norm", names.last_norm))
    if not spec.tied_embeddings:
        parts.append(_part("head", (f"{names.head}.weight",), (spec.vocab_size,), width))
    if spec.embedding_size is not None:
        parts.append(_part("project_out", (f"{names.project_out}.weight",), (width,), hidden))
    return tuple(parts)


def stage_parts(spec: ModelSpec, layers: LayerRange) -> tuple[Part, ...]:
    """Return the parts outside the layers that a stage with these layers needs.

    The first one embeds, the last one has the head; those between need nothing. A tied embedding is on both ends.
    """
    wanted = set(_FIRST_STAGE) if layers.first == 0 else set()
    if layers.end == spec.num_layers:
        wanted.update(_LAST_STAGE, ("embedding",) if spec.tied_embeddings else ())
    return tuple(part for part in outer_parts(spec) if part.name in wanted)


def outer_split(spec: ModelSpec, dtype: NumberType) -> tuple[int, int]:
    """Return which bytes of the outer buffer the stages of a pipeline need.

    Returns:
        The end of what the first layer's stage needs, and the begin of what the last layer's needs. A tied embedding
        is needed by both.
    """
    parts = outer_parts(spec)
    at = [part.name for part in parts].index("embedding")
    begin, end = buffer_bytes(parts[:at], dtype), buffer_bytes(parts[: at + 1], dtype)
    return end, begin if spec.tied_embeddings else end


def all_parts(spec: ModelSpec) -> Iterator[Part]:
    """Yield every part of the model."""
    yield from outer_parts(spec)
    for layer in range(spec.num_layers):
        yield from layer_parts(spec, layer)


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters; a tied head counts once."""
    return sum(part.numel for part in all_parts(spec))


def buffer_bytes(parts: tuple[Part, ...], dtype: NumberType) -> int:
    """Return the size of the buffer that holds the parts, with alignment."""
    return sum(_aligned(part.numel * dtype.itemsize) for part in parts)


def layer_bytes(spec: ModelSpec, dtype: NumberType) -> tuple[int, ...]:
    """Return the size of each layer's buffer."""
    return tuple(buffer_bytes(layer_parts(spec, layer), dtype) for layer in range(spec.num_layers))


def parameter_bytes(spec: ModelSpec, dtype: NumberType, layers: LayerRange | None = None, page_bytes: int = 1) -> int:
    """Return the memory that the parameters take, with alignment, if each buffer takes whole pages.

    Args:
        spec: the model.
        dtype: of all parameters.
        layers: of a stage; None: the whole model.
        page_bytes: 1: buffers take no more than they need.
    """
    held = LayerRange(0, spec.num_layers) if layers is None else layers
    buffers = (*layer_bytes(spec, dtype)[held.first : held.end], buffer_bytes(stage_parts(spec, held), dtype))
    return sum(-(-size // page_bytes) * page_bytes for size in buffers)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class ParameterBuffer:
    """The parts of one layer, or those outside the layers, as views of one flat buffer.

    Args:
        parts: in the order of the buffer.
        dtype: of all of them.
        storage: [buffer_bytes(parts, dtype)] uint8; whoever owns it keeps it.
        names: of the parts that can be used; None: all.
    """

    def __init__(
        self, parts: tuple[Part, ...], dtype: torch.dtype, storage: torch.Tensor, names: Collection[str] | None = None
    ) -> None:
        assert storage.numel() == buffer_bytes(parts, dtype), "a buffer holds its parts and nothing else"
        self.parts = parts if names is None else tuple(part for part in parts if part.name in names)
        self.dtype = dtype
        self.storage = storage
        self._all_parts = parts
        self._views: dict[str, torch.Tensor] = {}
        offset = 0
        for part in parts:
            num_bytes = part.numel * dtype.itemsize
            if part in self.parts:
                self._views[part.name] = self.storage[offset : offset + num_bytes].view(dtype).view(part.shape)
            offset += _aligned(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the parts that can be used, without what aligns them."""
        return sum(part.numel for part in self.parts) * self.dtype.itemsize

    def only(self, names: Collection[str]) -> ParameterBuffer:
        """Return the same buffer with some of its parts; a use of another one is an error."""
        return ParameterBuffer(self._all_parts, self.dtype, self.storage, names)

    def within(self, spans: Iterable[tuple[int, int]]) -> ParameterBuffer:
        """Return the same buffer with the parts that have a byte in one of the half-open spans of it."""
        spans, begin = tuple(spans), self.storage.data_ptr()
        sizes = {name: (view.data_ptr() - begin, view.numel() * view.itemsize) for name, view in self._views.items()}
        return self.only(
            [name for name, (at, size) in sizes.items() if any(first < at + size and at < end for first, end in spans)]
        )

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a part."""
        return self._views[name]

    def get(self, name: str) -> torch.Tensor | None:
        """Return a part, or None if this model has none of that name."""
        return self._views.get(name)


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All parameters of a model, or of a stage of it, on one device."""

    outer: ParameterBuffer
    """See `outer_parts`, and `stage_parts`."""
    layers: tuple[ParameterBuffer, ...]
    """By layer, numbered in the whole model: see `layer_parts`; those of other stages' layers have no part."""

    @property
    def dtype(self) -> torch.dtype:
        """Of all parameters."""
        return self.outer.dtype

    def of_stage(self, spec: ModelSpec, layers: LayerRange) -> ModelWeights:
        """Return the same buffers with only the parts that a stage needs; a use of another one is an error."""
        outer = self.outer.only([part.name for part in stage_parts(spec, layers)])
        return ModelWeights(outer, tuple(each if i in layers else each.only(()) for i, each in enumerate(self.layers)))
