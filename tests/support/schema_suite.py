"""The public suite of JSON Schema, as it lies in the source archive of the `jsonschema` package; and texts of values.

The archive is fetched by pip into a folder that git ignores; nothing of it is part of this repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any, Final

from shared.grammars import GrammarCompiler

VERSION: Final = "4.26.0"
FOLDER: Final = Path(__file__).parents[2] / ".schema-suite"
MAX_TEXTS: Final = 3000
"""Texts of one value that are tried."""
_TESTS: Final = "/json/tests/draft2020-12/"


@dataclass(frozen=True, slots=True)
class Instance:
    """A value, and whether the schema allows it."""

    about: str
    value: Any
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Group:
    """A schema of the suite, and its instances."""

    file: str
    """Such as `enum.json`, `optional/bignum.json`."""
    about: str
    schema: Any
    instances: tuple[Instance, ...]


def tokens_of(compiler: GrammarCompiler, text: str) -> list[int]:
    """Return some ids that make up a text."""
    ids: list[int] = compiler._tokenizer.tokenize_str(text)
    return ids


def fetch() -> Path:
    """Return the archive, which is fetched once."""
    archive = FOLDER / f"jsonschema-{VERSION}.tar.gz"
    if not archive.exists():
        FOLDER.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            what = ("--no-deps", "--no-binary", "jsonschema", f"jsonschema=={VERSION}", "--dest", folder)
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *what], check=True, timeout=300)
            (Path(folder) / archive.name).replace(archive)
    return archive


def groups() -> list[Group]:
    """Return all of the draft 2020-12, optional ones too, by file."""
    found: list[Group] = []
    with tarfile.open(fetch()) as archive:
        for name in sorted(archive.getnames()):
            _, is_test, file = name.partition(_TESTS)
            content = archive.extractfile(name) if is_test and name.endswith(".json") else None
            for group in json.load(content) if content is not None else ():
                instances = (Instance(test["description"], test["data"], test["valid"]) for test in group["tests"])
                found.append(Group(file, group["description"], group["schema"], tuple(instances)))
    return found


def texts_of(value: Any) -> Iterator[str]:
    """Give texts that are a value: by order of names, spelling of numbers and escapes, with and without spaces."""
    yield from dict.fromkeys(
        text for comma, colon in ((",", ":"), (", ", ": ")) for text in _spelled(value, comma, colon)
    )


def _spelled(value: Any, comma: str, colon: str) -> list[str]:
    return list(islice(_spellings(value, comma, colon), MAX_TEXTS))


def _spellings(value: Any, comma: str, colon: str) -> Iterator[str]:
    match value:
        case dict():
            for names in permutations(value):
                for members in product(*(_members(name, value[name], comma, colon) for name in names)):
                    yield "{" + comma.join(members) + "}"
        case list():
            for items in product(*(_spelled(item, comma, colon) for item in value)):
                yield "[" + comma.join(items) + "]"
        case str():
            yield from dict.fromkeys((json.dumps(value, ensure_ascii=False), json.dumps(value)))
        case bool() | None:
            yield json.dumps(value)
        case int():
            yield from (str(value), f"{value}.0")
        case float():
            whole = (str(int(value)),) if value.is_integer() else ()
            plain = (f"{value:f}",) if float(f"{value:f}") == value else ()
            yield from dict.fromkeys((json.dumps(value), *whole, *plain))


def _members(name: str, value: Any, comma: str, colon: str) -> list[str]:
    return [f"{key}{colon}{text}" for key in _spelled(name, comma, colon) for text in _spelled(value, comma, colon)]
