"""What a model takes: parameters, KV and workspace, by its config.json and the size of its files. Pure but for reading.

budget   parameters | workspace of steps | KV, so many bytes a token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.model_families import DEFAULTS, family_of
from shared.reading import parse_json

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
MAX_TOKENS: Final = 2048
"""Of a worker's step, unless it is told otherwise."""
MAX_ROWS: Final = 256
"""The same."""
LEAST_WORKSPACE_BYTES: Final = 4 * 2**20
USUAL_CONTEXT: Final = 8192
"""Tokens of a long conversation, by which is counted how much fits."""
CPU_BYTES_PER_S: Final = 50e9
"""What memory of a desktop's CPU gives, two channels of DDR5; each token reads all parameters once."""


@dataclass(frozen=True, slots=True)
class CheckpointSizes:
    """What a model is counted by; 0 where it is not known."""

    name: str
    num_parameters: int = 0
    num_layers: int = 0
    kv_values: int = 0
    """Keys and values of one token in all layers."""
    hidden_size: int = 0
    vocab_size: int = 0
    max_positions: int = 0
    """Longest sequence that it was made for."""
    is_served: bool = False
    """Whether it is of a kind that workers know."""

    @property
    def is_known(self) -> bool:
        """Whether it says what KV and steps take."""
        return bool(self.kv_values and self.hidden_size and self.vocab_size)

    def parameter_bytes(self, dtype: str) -> int:
        """Return what one copy of the parameters takes."""
        return self.num_parameters * ITEM_BYTES[dtype]

    def kv_token_bytes(self, dtype: str) -> int:
        """Return what the KV of one token takes."""
        return self.kv_values * ITEM_BYTES[dtype]

    def workspace_bytes(self, dtype: str, max_tokens: int = MAX_TOKENS, max_rows: int = MAX_ROWS) -> int:
        """Return about what a worker's largest step takes beside parameters and KV; the worker measures it."""
        numbers = 24 * max_tokens * self.hidden_size + 6 * max_rows * self.vocab_size
        return LEAST_WORKSPACE_BYTES + ITEM_BYTES[dtype] * numbers

    def least_bytes(self, dtype: str, num_tokens: int) -> int:
        """Return about the smallest budget in which so many tokens are served at a time."""
        return self.parameter_bytes(dtype) + self.workspace_bytes(dtype) + num_tokens * self.kv_token_bytes(dtype)

    def kv_tokens(self, dtype: str, memory_bytes: int) -> int:
        """Return about how many tokens' KV a budget holds beside the rest."""
        return max(memory_bytes - self.least_bytes(dtype, 0), 0) // self.kv_token_bytes(dtype)


def sizes_of(name: str, config: Mapping[str, Any], num_bytes: int) -> CheckpointSizes:
    """Return the sizes of a model.

    Args:
        name: of the model.
        config: its config.json; what is missing there is its family's.
        num_bytes: of the files with its weights.
    """
    whole = {**DEFAULTS.get(family_of(config) or "", {}), **config}
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    itemsize = ITEM_BYTES.get(stored, 4) if isinstance(stored, str) else 4
    num_layers, num_heads = _count(whole, "num_hidden_layers"), _count(whole, "num_attention_heads")
    hidden_size = _count(whole, "hidden_size")
    head_dim = _count(whole, "head_dim") or hidden_size // max(num_heads, 1)
    return CheckpointSizes(
        name=name,
        num_parameters=num_bytes // itemsize,
        num_layers=num_layers,
        kv_values=2 * num_layers * (_count(whole, "num_key_value_heads") or num_heads) * head_dim,
        hidden_size=hidden_size,
        vocab_size=_count(whole, "vocab_size"),
        max_positions=_count(whole, "max_position_embeddings"),
        is_served=family_of(config) is not None,
    )


def read_sizes(folder: Path) -> CheckpointSizes:
    """Return the sizes of a checkpoint on this machine."""
    files = read_json(folder / "model.safetensors.index.json").get("weight_map")
    names = set(files.values()) if isinstance(files, dict) else {path.name for path in folder.glob("*.safetensors")}
    try:
        num_bytes = sum((folder / str(name)).stat().st_size for name in names)
    except OSError:
        num_bytes = 0
    return sizes_of(folder.name, read_json(folder / "config.json"), num_bytes)


def read_json(path: Path) -> dict[str, Any]:
    """Return an object of a file; an empty one if there is none in it."""
    try:
        found = parse_json(path.read_bytes(), allow_inf_nan=True)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else 0
