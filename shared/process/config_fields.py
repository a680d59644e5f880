"""What a setting's field says about itself in words: its flag, what is allowed, its line of help. No sources here."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d{1,9})?)\s*(?:([KMGT])(iB|B)?|B)?\s*\Z", re.ASCII | re.IGNORECASE)
_EXPONENT: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
AUTO: Final = "auto"
"""What a setting says that the program chooses by what it finds."""
SIZE_ALLOWED: Final = "bytes, or a number with KiB, MiB, GiB, TiB, or KB, MB, GB, TB; G alone is GiB"


@dataclass(frozen=True, slots=True)
class SizeType:
    """Marks an integer field that is written as a size, `512MiB`."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Marks a field that the program chooses by what it finds where nobody names it: then it is not among those set."""


@dataclass(frozen=True, slots=True)
class FieldType:
    """A field's annotation without `Annotated` and `| None`."""

    base: Any
    metadata: tuple[Any, ...]
    """Constraints and markers (annotated_types, `SizeType`, `Auto`)."""

    @property
    def is_bool(self) -> bool:
        """Whether the field is a switch."""
        return self.base is bool

    @property
    def is_sequence(self) -> bool:
        """Whether the field takes several values."""
        return get_origin(self.base) in (tuple, list, frozenset, set, Sequence) or self.base in (tuple, list)

    @property
    def is_size(self) -> bool:
        """Whether the field is written as a size."""
        return any(isinstance(item, SizeType) for item in self.metadata)

    @property
    def is_chosen(self) -> bool:
        """Whether the program chooses it where nobody names it."""
        return any(isinstance(item, Auto) for item in self.metadata)

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a `Literal` or enumeration; empty for other types."""
        if get_origin(self.base) is Literal:
            return tuple(str(value) for value in get_args(self.base))
        if isinstance(self.base, type) and issubclass(self.base, Enum):
            return tuple(str(member.value) for member in self.base)
        return ()


def parse_size(value: object) -> int:
    """Return bytes from an integer or from text such as `512MiB`, `1.5 GiB`, `8GB`, `8g`, `4096`.

    Letters of either case; `GB` is 10^9 bytes, and `GiB`, or `G` alone, 2^30. Fractions of a byte are cut off.

    Raises:
        ValueError: it is neither; the text says what is allowed.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"'{str(value)[:80]}' is not a size (allowed: {SIZE_ALLOWED})")
    number, prefix, unit = match.groups(default="")
    whole, _, fraction = number.partition(".")
    scaled: int = int(whole + fraction) * (1000 if unit.upper() == "B" else 1024) ** _EXPONENT[prefix.upper()]
    return scaled // int(10 ** len(fraction))


def field_type(field: FieldInfo) -> FieldType:
    """Return the field's type without its wrappers."""
    base: Any = field.annotation
    metadata = list(_flatten(field.metadata))
    while True:
        if get_origin(base) is Annotated:
            base, *inner = get_args(base)
            metadata += _flatten(inner)
            continue
        if get_origin(base) in (Union, types.UnionType):
            inner_types = [item for item in get_args(base) if item is not types.NoneType]
            if len(inner_types) == 1:
                base = inner_types[0]
                continue
        return FieldType(base, tuple(metadata))


def _flatten(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, FieldInfo):
            yield from item.metadata
        else:
            yield item


def flag_name(field_name: str) -> str:
    """Return the flag of a field: `max_len` gives `--max-len`."""
    return "--" + field_name.replace("_", "-")


def allowed_text(field: FieldInfo) -> str:
    """Return what may stand there, to follow the word "use"; for example "a whole number from 1 to 65535"."""
    kind = field_type(field)
    if kind.is_chosen:
        return f"{AUTO}, or {_allowed_value(kind)}"
    return _allowed_value(kind)


def _allowed_value(kind: FieldType) -> str:
    if kind.choices:
        return " or ".join([", ".join(kind.choices[:-1]), kind.choices[-1]]) if kind.choices[1:] else kind.choices[0]
    if kind.is_bool:
        return "true or false"
    if kind.is_size:
        return SIZE_ALLOWED + _range_text(kind.metadata)
    if kind.is_sequence:
        return "values separated by commas"
    names = {int: "a whole number", float: "a finite number", str: "text", Path: "a path"}
    return names.get(kind.base, "another value") + _range_text(kind.metadata)


def _range_text(metadata: tuple[Any, ...]) -> str:
    low, high = "", ""
    for item in metadata:
        if isinstance(item, Ge):
            low = f"from {_number(item.ge)}"
        elif isinstance(item, Gt):
            low = f"above {_number(item.gt)}"
        elif isinstance(item, Le):
            high = f"{'to' if low.startswith('from') else 'up to'} {_number(item.le)}"
        elif isinstance(item, Lt):
            high = f"below {_number(item.lt)}"
    if low.startswith("from") and not high:
        low += " on"
    joint = " and " if low.startswith("above") or high.startswith("below") else " "
    return "".join([" ", joint.join(text for text in (low, high) if text)]) if low or high else ""


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def default_text(field: FieldInfo) -> str:
    """Return the default for the help."""
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "default: made at start"
    if field_type(field).is_chosen:
        return f"default: {AUTO}"
    default = field.default
    if isinstance(default, Enum):
        default = default.value
    if isinstance(default, bool):
        default = str(default).lower()
    if isinstance(default, tuple | list):
        default = ",".join(str(item) for item in default)
    return f"default: {'none' if default in (None, '') else default}"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like this one, None if none is."""
    close = get_close_matches(name, sorted(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return the hint for an unknown name."""
    names = list(known)
    close = nearest(name, names, cutoff=0.0) if names else None
    return f"Did you mean {close}?" if close else otherwise


def help_text(model: type[BaseModel], program: str, env_names: dict[str, str]) -> str:
    """Return the page that `--help` prints: each field's flag, doc line, default and variable."""
    lines = [f"usage: {program} [--name VALUE ...]", ""]
    if model.__doc__:
        lines += [model.__doc__.strip().splitlines()[0], ""]
    for name, field in model.model_fields.items():
        kind = field_type(field)
        flag = flag_name(name)
        values = (AUTO, *kind.choices) if kind.is_chosen else kind.choices
        value = "" if kind.is_bool else f" {'SIZE' if kind.is_size else '|'.join(values) or 'VALUE'}"
        negative = f", --no-{flag[2:]}" if kind.is_bool else ""
        doc = " ".join((field.description or "").split())
        lines += [f"  {flag}{value}{negative}"]
        lines += [f"      {doc}"] if doc else []
        lines += [f"      ({default_text(field)}; {env_names[name]})"]
    lines += ["  --help", "      Print this page and exit."]
    return "\n".join(lines) + "\n"
