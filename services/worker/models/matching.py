"""Which tensor of a checkpoint is which of the model's, in every spelling that transformers takes.

    names without the base model's prefix, or with it twice    are read as those with one
    a tied model's head without an embedding                   is the embedding
    a head that differs though config.json ties it             counts; so does the embedding
    a tensor that the model does not read                      is left out; within the model's modules it is refused,
                                                               since its authors meant another text

Deviation: the last. transformers leaves those within out too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from services.worker.models.checkpoint import ITEM_BYTES, TensorEntry, same_bytes
from services.worker.models.families import FAMILIES
from services.worker.models.spec import ModelSpec
from services.worker.models.weights import all_parts
from shared.errors import StartupError

_PREFIX: Final = "model."
"""Of the base model's tensors in a model with a head; the same in every family."""
_BUFFERS: Final = re.compile(r"(^|\.)(rotary_emb\..+|position_ids|causal_mask|masked_bias)$")
"""What older checkpoints carry though it follows from config.json."""
_NOT_OURS: Final = "Check that config.json belongs to the weights"


@dataclass(frozen=True, slots=True)
class MatchedCheckpoint:
    """A model, and where its tensors lie."""

    spec: ModelSpec
    """As the checkpoint has it."""
    tensors: dict[str, TensorEntry]
    """By the names in `all_parts(spec)`, nothing else."""
    unused: tuple[str, ...]
    """Names of tensors that are no part of the model, buffers excepted."""
    is_untied: bool
    """config.json ties the head to the embedding, but they differ."""


def match_checkpoint(spec: ModelSpec, found: dict[str, TensorEntry]) -> MatchedCheckpoint:
    """Find the model's tensors among those of the checkpoint.

    Args:
        spec: by config.json.
        found: of `find_tensors`.

    Raises:
        StartupError: a tensor is missing, there twice, of another shape or type, or in the model and not known to it.
    """
    names = FAMILIES[spec.architecture].names
    head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    tensors = _renamed(found, {head, *(source.name for part in all_parts(spec) for source in part.sources)})
    has_own_head = spec.tied_embeddings and head in tensors
    is_untied = has_own_head and embedding in tensors and not same_bytes(tensors[head], tensors[embedding])
    if is_untied:
        spec = replace(spec, tied_embeddings=False)
    elif has_own_head:
        tensors[embedding] = tensors.pop(head)
    expected = {source.name: source.shape for part in all_parts(spec) for source in part.sources}
    for name, shape in expected.items():
        _check(name, shape, tensors.get(name))
    others = tuple(name for name in tensors if name not in expected and not _BUFFERS.search(name))
    modules = {names.head, *(name.rpartition(".")[0] for name in expected)}
    for name in others:
        if _is_within(name, modules, f"{names.layers}."):
            said = f"the checkpoint has a tensor {name} that {spec.architecture} does not use"
            raise StartupError(said, _NOT_OURS, "unsupported_model")
    return MatchedCheckpoint(spec, {name: tensors[name] for name in expected}, others, is_untied)


def _renamed(found: dict[str, TensorEntry], known: set[str]) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for name, entry in found.items():
        ours = name
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) in known:
            ours = name.removeprefix(_PREFIX)
        elif _PREFIX + name in known:
            ours = _PREFIX + name
        if ours in tensors and not same_bytes(tensors[ours], entry):
            raise StartupError(f"the checkpoint has {ours} twice, also as {entry.name}, and they differ", _NOT_OURS)
        tensors[ours] = entry
    return tensors


def _is_within(name: str, modules: set[str], layers: str) -> bool:
    """Return whether a tensor without use belongs to a module or a layer of the model, or is an adapter's."""
    spellings = (name, _PREFIX + name, name.removeprefix(_PREFIX))
    return "lora_" in name or any(each.rpartition(".")[0] in modules or each.startswith(layers) for each in spellings)


def _check(name: str, shape: tuple[int, ...], entry: TensorEntry | None) -> None:
    if entry is None:
        raise StartupError(f"the checkpoint has no tensor {name}", _NOT_OURS, "broken_checkpoint")
    if entry.shape != shape:
        said = f"{entry.name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
        raise StartupError(said, _NOT_OURS, "broken_checkpoint")
    if entry.dtype not in ITEM_BYTES:
        raise StartupError(
            f"{entry.name} is of type {entry.dtype}, which is not supported",
            f"Convert the checkpoint to one of {', '.join(ITEM_BYTES)}",
        )
