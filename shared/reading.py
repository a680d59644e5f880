"""Reads what others wrote, under limits: files, JSON, TOML. Whatever comes from outside as such goes through here.

    InputFile ─► a regular file? ─► small enough? ─► bytes ─► UTF-8 ─► parse_json, parse_toml ─► plain values

Neither memory nor time depends on what somebody thought up: a file is at most as large as its reader says, and what
stands in it nests no deeper, and has no more parts, than a limit. A pipe or a device, which may never end, is no file.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Generator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, Final

from pydantic_core import from_json

from shared.errors import StartupError
from shared.sizes import describe_bytes

MAX_PARTS: Final = 2**21
"""Arrays, objects and strings (names too) in one JSON text; each takes some hundred bytes at most beside its own."""
MAX_TOML_DEPTH: Final = 32
"""Tables and arrays within each other. (JSON: the parser's own limit of about 200.)"""
MAX_TOML_DOTS: Final = 2**23
"""Sum of the squares of the dots in each line: so long takes `tomllib` for keys such as `a.b.c`."""
_INT64: Final = 2**63
_ESCAPE: Final = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[^dD]|\\u[dD][0-7]|\\[^u])|\\u[dD][0-9a-fA-F]{3}")
"""In JSON: a surrogate pair or what begins another escape, else half of a pair."""


class TooManyPartsError(ValueError):
    """A JSON text has more arrays, objects and strings than its reader allows."""


def is_folder(path: Path) -> bool:
    """Return whether a folder is there; what cannot be looked at is none, whatever `Path.is_dir` makes of it."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_file(path: Path) -> bool:
    """Return whether a regular file is there; as `is_folder`."""
    try:
        return path.is_file()
    except OSError:
        return False


def check_text(text: str) -> str:
    """Return a text that files, messages and logs can carry, as it is.

    Raises:
        ValueError: it is no UTF-8: a file's name, or an argument, of other bytes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8") from None
    return text


def parse_json(data: bytes | str, *, allow_inf_nan: bool = False, max_parts: int = MAX_PARTS) -> Any:
    """Return the value. Strict: UTF-8 without BOM, no lone surrogates, integers of at most 4300 digits.

    Args:
        data: of any length; whoever took it in has bounded it.
        allow_inf_nan: take the numbers that are none, which Python writes.
        max_parts: see `MAX_PARTS`.

    Raises:
        TooManyPartsError: it has more.
        ValueError: it is no JSON within the limits; the text goes on after "it is ", and repeats nothing of it.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if _has_more_parts(data, max_parts):
        raise TooManyPartsError(f"JSON of more than {max_parts} arrays, objects and strings")
    try:
        return from_json(data, allow_inf_nan=allow_inf_nan, cache_strings="none")
    except (ValueError, RecursionError) as error:
        problem = "it is nested too deep" if "recursion" in str(error) else str(error)
        raise ValueError(f"not valid JSON: {problem}") from None


def _parse_of_python(data: bytes, max_parts: int) -> Any:
    """Return the value, as `parse_json`, also of what Python alone writes: see `InputFile.read_json`."""
    try:
        return parse_json(data, allow_inf_nan=True, max_parts=max_parts)
    except ValueError as error:
        if "hex escape" not in str(error):
            raise
    whole = _ESCAPE.sub(lambda match: match[1] or rb"\ufffd", data)
    return parse_json(whole, allow_inf_nan=True, max_parts=max_parts)


def _has_more_parts(data: bytes, max_parts: int) -> bool:
    """Return whether there are more than `max_parts`; counted exactly only if a rough count leaves it open."""
    if _count_brackets(data) + data.count(b'"') // 2 <= max_parts:
        return False
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quotation mark begins or ends a string
    num_strings = plain.count(b'"') // 2
    if num_strings > max_parts:
        return True
    return num_strings + _count_brackets(b"".join(plain.split(b'"')[::2])) > max_parts


def _count_brackets(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def parse_toml(text: str) -> dict[str, Any]:
    """Return the document. Integers have 64 bits, as TOML says, and no text a NUL character.

    Raises:
        ValueError: it is no TOML within the limits; the text goes on after "it is ".
    """
    if sum(line.count(".") ** 2 for line in text.split("\n")) > MAX_TOML_DOTS:
        raise ValueError("not valid TOML: a line of it has too many dots")
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise ValueError("not valid TOML: it is nested too deep") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not valid TOML: {error}") from None
    except ValueError:  # Python's own limit
        raise ValueError("not valid TOML: it has a number of too many digits") from None
    _check_values(document)
    return document


def _check_values(document: dict[str, Any]) -> None:
    layer: list[Any] = [document]
    for _ in range(MAX_TOML_DEPTH):
        nested: list[Any] = []
        for value in layer:
            for item in [*value, *value.values()] if isinstance(value, dict) else value:
                if isinstance(item, dict | list):
                    nested.append(item)
                elif isinstance(item, int) and not -_INT64 <= item < _INT64:
                    raise ValueError("not valid TOML: it has a number of more than 64 bits")
                elif isinstance(item, str) and "\0" in item:
                    raise ValueError("not usable: a text in it has a NUL character")
        layer = nested
    if layer:
        raise ValueError("not valid TOML: it is nested too deep")


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file that somebody else wrote. All that can be wrong with it is one error that names it."""

    path: Path
    max_bytes: int
    """Largest that is read."""
    what: str = ""
    """What it is, before the path in errors: "the file of keys"."""
    hint: str = ""
    """What to do if it is wrong."""
    kind: type[StartupError] = StartupError
    """Of the errors."""

    def exists(self) -> bool:
        """Return whether something is there, be it a link to nothing."""
        return os.path.lexists(self.path)

    def read_bytes(self) -> bytes:
        """Return the contents.

        Raises:
            StartupError: it is not there, no regular file, too large, or cannot be read; of type `kind`.
        """
        try:
            with self._open() as file:
                data = file.read(self.max_bytes + 1)
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror}") from None
        if len(data) > self.max_bytes:  # it grows, or has no length, as what /proc has
            raise self.error(self._too_large())
        return data

    def read_text(self) -> str:
        """Return the contents as text, line ends as they are; raises as `read_bytes`, or because it is not UTF-8."""
        try:
            return self.read_bytes().decode()
        except UnicodeDecodeError:
            raise self.error("is not UTF-8 text") from None

    def read_json(self, *, max_parts: int = MAX_PARTS) -> Any:
        """Return what stands in it; raises as `read_bytes`, or because it is no JSON.

        What Python writes is taken: numbers that are none, and halves of surrogate pairs, which become U+FFFD.
        """
        data = self.read_bytes()
        try:
            return _parse_of_python(data, max_parts)
        except ValueError as error:
            raise self.error(f"is {error}") from None

    def read_toml(self) -> dict[str, Any]:
        """Return what stands in it; raises as `read_text`, or because it is no TOML."""
        text = self.read_text()
        try:
            return parse_toml(text)
        except ValueError as error:
            raise self.error(f"is {error}") from None

    def lines(self) -> Generator[str]:
        """Read it as text by lines, their ends as they are, a BOM left out; raises as `read_text`, when it shows.

        Close it when you may stop before the end: what holds an error would hold the open file as well.
        """
        left = self.max_bytes
        try:
            with self._open() as file, TextIOWrapper(file, "utf-8-sig", newline="") as text:
                while line := text.readline(left + 1):
                    left -= len(line)
                    if left < 0:
                        raise self.error(self._too_large())
                    yield line
        except UnicodeDecodeError:
            raise self.error("is not UTF-8 text") from None
        except OSError as error:
            raise self.error(f"cannot be read: {error.strerror}") from None

    def error(self, problem: str) -> StartupError:
        """Return the error that says of this file what is wrong, in words that go on after its path."""
        return self.kind(f"{self.what} {self.path} {problem}".strip(), self.hint)

    def _open(self) -> BinaryIO:
        """Open it once it is known to be a regular file that is small enough; raises OSError too."""
        try:
            # not to wait for whoever writes into a pipe
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except ValueError:
            raise self.error("is no name that a file can have") from None
        try:
            self._check(os.fstat(descriptor))
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def _check(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            raise self.error("is a folder" if stat.S_ISDIR(status.st_mode) else "is no regular file")
        if status.st_size > self.max_bytes:
            raise self.error(self._too_large())

    def _too_large(self) -> str:
        return f"is larger than {describe_bytes(self.max_bytes)}"
