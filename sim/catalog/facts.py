"""Facts about models and GPUs, read from the catalogue's own files."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Self, TypeVar

from pydantic import Field, model_validator

from shared.types import Value
from sim.names import unknown_name

_FOLDER = Path(__file__).parent
_Count = Annotated[int, Field(ge=1)]
_Amount = Annotated[float, Field(gt=0)]


class CatalogModel(Value):
    """One model; see `models.toml`."""

    title: str
    num_parameters: _Count
    num_layers: _Count
    hidden_size: _Count
    num_kv_heads: _Count
    head_dim: _Count
    vocab_size: _Count
    max_positions: _Count
    bytes_per_parameter: _Count = 2
    bytes_per_kv_value: _Count = 2
    source: str

    @property
    def parameter_bytes(self) -> int:
        """One copy of the weights."""
        return self.num_parameters * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv_value


class GpuFacts(Value):
    """One kind of GPU; see `gpus.toml`."""

    title: str
    memory_gb: _Amount
    memory_gb_per_s: _Amount
    half_tflop_per_s: _Amount
    host_link_gb_per_s: _Amount
    network_gb_per_s: _Amount
    cost_profiles: tuple[str, ...] = ()
    scaled_from: str | None = None
    source: str

    @model_validator(mode="after")
    def _one_source_of_cost(self) -> Self:
        if bool(self.cost_profiles) == bool(self.scaled_from):
            raise ValueError("either cost_profiles or scaled_from")
        return self

    @property
    def memory_bytes(self) -> int:
        """Device memory."""
        return round(self.memory_gb * 1e9)


_Facts = TypeVar("_Facts", CatalogModel, GpuFacts)


@cache
def models() -> dict[str, CatalogModel]:
    """Return the models by name."""
    return {name: CatalogModel.model_validate(table) for name, table in _tables("models.toml").items()}


@cache
def gpus() -> dict[str, GpuFacts]:
    """Return the GPUs by name."""
    return {name: GpuFacts.model_validate(table) for name, table in _tables("gpus.toml").items()}


def find_model(name: str) -> tuple[str, CatalogModel]:
    """Return a model's name as the catalogue writes it, and the model; capital letters do not matter.

    Raises:
        StartupError: the catalogue has none of this name.
    """
    return _find("model", name, models())


def find_gpu(name: str) -> tuple[str, GpuFacts]:
    """Return a GPU's name as the catalogue writes it, and the GPU; capital letters do not matter.

    Raises:
        StartupError: the catalogue has none of this name.
    """
    return _find("GPU", name, gpus())


def _find(what: str, name: str, known: dict[str, _Facts]) -> tuple[str, _Facts]:
    if name.lower() not in known:
        raise unknown_name(f"the catalogue has no {what}", name.lower(), known)
    return name.lower(), known[name.lower()]


def _tables(file: str) -> dict[str, object]:
    return tomllib.loads((_FOLDER / file).read_text(encoding="utf-8"))
