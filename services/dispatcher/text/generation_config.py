"""The model's own default sampling: what its makers wrote into `generation_config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.errors import StartupError
from shared.model_files import MAX_COUNT, read_object

FILE_NAME: Final = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What holds for a parameter that a request does not give; the defaults here are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the defaults that stand in the model's folder, OpenAI's for each that does not.

    As in vLLM, `do_sample` is not looked at: a file without a temperature means 1, not greedy.

    Raises:
        StartupError: the file is malformed, or a value is outside of what a request could ask for.
    """
    path = folder / FILE_NAME
    content = read_object(path, required=False)
    return SamplingDefaults(
        temperature=_number(content, path, "temperature", 1.0, lambda value: 0 <= value <= 2),
        top_p=_number(content, path, "top_p", 1.0, lambda value: 0 < value <= 1),
        top_k=_top_k(content, path),
        min_p=_number(content, path, "min_p", 0.0, lambda value: 0 <= value <= 1),
        repetition_penalty=_number(content, path, "repetition_penalty", 1.0, lambda value: 0 < value <= 2),
    )


def _top_k(content: Mapping[str, Any], path: Path) -> int:
    value = _number(content, path, "top_k", 0, lambda value: value >= -1 and value == int(value))
    return max(0, int(value))


def _number(
    content: Mapping[str, Any], path: Path, name: str, default: float, is_allowed: Callable[[float], bool]
) -> float:
    value = content.get(name)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) < MAX_COUNT or not is_allowed(value):
        hint = "Correct the file, or leave it out with --generation-config none"
        raise StartupError(f"{name} in {path} is not a value that can be served", hint)
    return float(value)
