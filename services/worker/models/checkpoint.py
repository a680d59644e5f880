"""Checks a checkpoint's safetensors files by their headers, before any memory is taken for tensors.

Format of a file: u64 little-endian length n, n bytes of JSON {name: {dtype, shape, data_offsets}}, then the data, which
the tensors cover without a gap. Source: the safetensors format description. What is within our limits is opened by the
library too, which will read it: it may refuse more, as metadata that is no text, or a type that it does not know.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shared.errors import StartupError
from shared.model_files import COPY_AGAIN, read_object
from shared.reading import is_file, parse_json

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 16 * 1024 * 1024
"""A sixth of what the format allows: a hundred thousand tensors, for which a file of one model has room."""
MAX_TENSORS = 100_000
"""Of a checkpoint: the deepest model that is served has some fifty thousand."""
MAX_DIMENSIONS = 8
"""Of a tensor, also of one that is not read."""
_MAX_NUMBER = 2**63 - 1

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of which parameters are read."""
_OTHER_ITEM_BYTES = {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
_COMPARE_BYTES = 2**24
"""Read at a time of two tensors that are compared."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies."""

    name: str
    """In the file."""
    path: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset: int
    """Of the first byte, in the file."""


def find_tensors(model_dir: Path) -> dict[str, TensorEntry]:
    """Return every tensor of the checkpoint, by name, after checking all headers against the files' lengths.

    As transformers: a file with all tensors goes before an index, and of an index only the files that it names count.

    Raises:
        StartupError: files are missing, truncated, or contradict themselves.
    """
    single, index_path = model_dir / SINGLE_NAME, model_dir / INDEX_NAME
    if is_file(single):
        return read_header(single)
    if os.path.lexists(index_path):
        return _from_index(model_dir, read_object(index_path).get("weight_map"))
    if any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt*")):
        raise StartupError(
            f"{model_dir} holds pickled weights, which are never read",
            "Save the checkpoint as safetensors",
            "unsupported_model",
        )
    raise StartupError(f"{model_dir} has neither {SINGLE_NAME} nor {INDEX_NAME}", COPY_AGAIN, "broken_checkpoint")


def same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Return whether two tensors are equal; reads them.

    Raises:
        StartupError: a file cannot be read.
    """
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with one.path.open("rb") as first, other.path.open("rb") as second:
            first.seek(one.offset)
            second.seek(other.offset)
            pieces = range(0, one.num_bytes, _COMPARE_BYTES)
            sizes = (min(_COMPARE_BYTES, one.num_bytes - done) for done in pieces)
            return all(first.read(size) == second.read(size) for size in sizes)
    except OSError as error:
        raise _broken(one.path, f"it cannot be read ({error})") from error


def _from_index(model_dir: Path, weight_map: object) -> dict[str, TensorEntry]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{INDEX_NAME} has no weight_map", COPY_AGAIN)
    if len(weight_map) > MAX_TENSORS:
        raise StartupError(f"{INDEX_NAME} names {len(weight_map)} tensors, more than {MAX_TENSORS}", COPY_AGAIN)
    for file_name in weight_map.values():
        if not isinstance(file_name, str) or file_name.startswith("/") or ".." in Path(file_name).parts:
            raise StartupError(f"{INDEX_NAME} names {file_name!r}, which is no file of the folder", COPY_AGAIN)
    found: dict[str, TensorEntry] = {}
    for path in sorted({model_dir / file_name for file_name in weight_map.values()}):
        found.update(_read_shard(path))
    return found


def _read_shard(path: Path) -> dict[str, TensorEntry]:
    if not is_file(path):
        raise StartupError(f"{path.name} is missing, {INDEX_NAME} names it", COPY_AGAIN, "broken_checkpoint")
    return read_header(path)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of one file, after checking its header.

    Raises:
        StartupError: the file is truncated or its header is broken.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise _broken(path, "it is truncated, or no safetensors file")
            data = file.read(length)
    except OSError as error:
        raise _broken(path, f"it cannot be read ({error.strerror})") from error
    try:
        header = parse_json(data)
    except ValueError as error:
        raise _broken(path, f"its header is {error}") from None
    if not isinstance(header, dict):
        raise _broken(path, "its header is no JSON object")
    header.pop("__metadata__", None)  # the library looks at it
    if len(header) > MAX_TENSORS:
        raise _broken(path, f"it has {len(header)} tensors, more than {MAX_TENSORS}")
    spans = []
    found = {}
    for name, value in header.items():
        found[name], span = _entry(path, name, value, 8 + length)
        spans.append(span)
    _check_cover(path, spans, size - 8 - length)
    try:
        with safe_open(path, framework="numpy"):
            return found
    except (SafetensorError, OSError) as error:
        raise _broken(path, str(error)) from error


def _entry(path: Path, name: str, value: Any, data_offset: int) -> tuple[TensorEntry, tuple[int, int]]:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(path, f"the entry of {name} is broken") from error
    if len(shape) > MAX_DIMENSIONS:
        raise _broken(path, f"{name} has {len(shape)} dimensions, more than {MAX_DIMENSIONS}")
    if not isinstance(dtype, str) or not all(type(each) is int and 0 <= each <= _MAX_NUMBER for each in numbers):
        raise _broken(path, f"the entry of {name} is broken")
    item_bytes = ITEM_BYTES.get(dtype) or _OTHER_ITEM_BYTES.get(dtype)
    if end < begin or (item_bytes is not None and end - begin != prod(shape) * item_bytes):
        raise _broken(path, f"length and shape of {name} contradict each other")
    return TensorEntry(name, path, dtype, shape, end - begin, data_offset + begin), (begin, end)


def _check_cover(path: Path, spans: list[tuple[int, int]], data_bytes: int) -> None:
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise _broken(path, "its tensors overlap or leave a gap")
        position = end
    if position > data_bytes:
        raise _broken(path, f"it is truncated: {position - data_bytes} bytes are missing")
    if position < data_bytes:
        raise _broken(path, f"it has {data_bytes - position} bytes too many")


def _broken(path: Path, what: str) -> StartupError:
    return StartupError(f"{path.name} is broken: {what}", COPY_AGAIN, "broken_checkpoint")
