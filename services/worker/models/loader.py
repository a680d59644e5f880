"""Reads a checked checkpoint into the model's buffers, converting the type on the way. No pickle, no code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.worker.models.checkpoint import TensorEntry
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import (
    ModelWeights,
    ParameterBuffer,
    Part,
    buffer_bytes,
    layer_parts,
    stage_parts,
)
from shared.errors import StartupError
from shared.layers import LayerRange
from shared.model_files import COPY_AGAIN

Progress = Callable[[float, str], None]
"""Called with the share done, 0 to 1, and what is going on."""
Room = Callable[[int | None, int], torch.Tensor]
"""Returns memory for the parameters of a layer, so many bytes; see `ModelMemory.parameters`."""


def load_weights(
    spec: ModelSpec,
    tensors: dict[str, TensorEntry],
    dtype: torch.dtype,
    room: Room,
    progress: Progress,
    layers: LayerRange | None = None,
) -> ModelWeights:
    """Fill the model's buffers.

    Args:
        spec: the model.
        tensors: of `match_checkpoint`.
        dtype: of all parameters.
        room: of the buffers.
        progress: called after each tensor with the share of bytes read.
        layers: of a stage, which loads nothing else; None: the whole model.

    Raises:
        StartupError: a file changed or broke since it was checked.
    """
    held = LayerRange(0, spec.num_layers) if layers is None else layers
    outer = _buffer(stage_parts(spec, held), None, dtype, room)
    parts = (layer_parts(spec, i) if i in held else () for i in range(spec.num_layers))
    buffers = tuple(_buffer(each, i, dtype, room) for i, each in enumerate(parts))
    _fill((outer, *buffers), tensors, progress)
    return ModelWeights(outer, buffers)


def copy_pieces(
    buffers: tuple[ParameterBuffer, ...], tensors: dict[str, TensorEntry], piece_elements: int | None = None
) -> Iterator[tuple[str, int]]:
    """Read all parts of some buffers from the checkpoint, over what is there, piece by piece as they are asked for.

    Args:
        buffers: with memory behind them.
        tensors: see `load_weights`.
        piece_elements: of a piece at most; None: a piece is a tensor.

    Yields:
        The name of the file and the bytes of the buffers that were filled from it.

    Raises:
        StartupError: see `load_weights`.
    """
    targets = _targets(buffers)
    for path in sorted({tensors[name].path for name in targets}):
        for name, tensor in _read(path, {name: tensors[name].name for name in targets if tensors[name].path == path}):
            source, target = tensor.reshape(-1), targets[name].view(-1)
            size = piece_elements or len(target)
            for first in range(0, len(target), size):
                piece = target[first : first + size]
                piece.copy_(source[first : first + size])
                yield path.name, piece.numel() * piece.itemsize


def _fill(buffers: tuple[ParameterBuffer, ...], tensors: dict[str, TensorEntry], progress: Progress) -> None:
    total = sum(buffer.num_bytes for buffer in buffers)
    done = 0
    for name, num_bytes in copy_pieces(buffers, tensors):
        done += num_bytes
        progress(done / total, f"loading {name}")


def _buffer(parts: tuple[Part, ...], layer: int | None, dtype: torch.dtype, room: Room) -> ParameterBuffer:
    return ParameterBuffer(parts, dtype, room(layer, buffer_bytes(parts, dtype)))


def _targets(buffers: tuple[ParameterBuffer, ...]) -> dict[str, torch.Tensor]:
    """Return, by name in the checkpoint, the rows that the tensor fills."""
    return {
        source.name: buffer[part.name][source.first_row : source.first_row + source.shape[0]]
        for buffer in buffers
        for part in buffer.parts
        for source in part.sources
    }


def _read(path: Path, names: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors of one file, by other names; each is a view of the mapped file, valid until the next is asked for.

    Args:
        path: of the file.
        names: in the file, by those that are yielded.
    """
    try:
        with safe_open(path, framework="pt") as file:
            for name, stored_name in names.items():
                yield name, file.get_tensor(stored_name)
    except (OSError, SafetensorError) as error:
        raise StartupError(f"cannot read {path.name}: {error}", COPY_AGAIN) from error
