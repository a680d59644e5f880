"""Files, JSON and TOML of others: what is absurd is one sentence that names the file, within limits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, StartupError
from shared.reading import MAX_TOML_DEPTH, InputFile, TooManyPartsError, parse_json, parse_toml

LIMIT_BYTES = 2**20


def file_at(path: Path) -> InputFile:
    return InputFile(path, LIMIT_BYTES, "the list", "Write another", ConfigError)


def make(path: Path, what: str) -> None:
    match what:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path)
        case "large":  # a hole: nothing of it may be read
            with path.open("wb") as file:
                file.truncate(300 * 2**20)
        case "device":
            path.symlink_to("/dev/zero")
        case "endless":  # says that it is empty
            path.symlink_to("/proc/self/pagemap")
        case "bytes":
            path.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("nothing", "cannot be read: No such file or directory"),
        ("folder", "is a folder"),
        ("pipe", "is no regular file"),
        ("device", "is no regular file"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("large", "is larger than 1.0 MiB"),
        ("endless", "is larger than 1.0 MiB"),
        ("bytes", "is not UTF-8 text"),
    ],
)
def test_what_is_no_small_text_file_is_one_sentence(tmp_path: Path, what: str, problem: str) -> None:
    path = tmp_path / "it"
    make(path, what)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    for read in (InputFile.read_text, InputFile.read_toml):
        with pytest.raises(ConfigError) as refused:
            read(file_at(path))
        assert str(refused.value) == f"sluice: the list {path} {problem}. Write another"
    with pytest.raises(ConfigError, match=problem):
        list(file_at(path).lines())
    assert file_at(path).exists() is (what != "nothing")
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open, "nothing is left open"


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "a\ud800b"])
def test_what_no_file_can_be_called_is_one_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError) as refused:
        file_at(tmp_path / name).read_bytes()
    assert "\n" not in str(refused.value)


def test_what_is_longer_than_a_sentence_is_cut() -> None:
    error = StartupError("x" * 10**6, "Write another")
    assert len(str(error)) < 1000
    assert str(error).endswith("…. Write another")


DEEP_JSON = ["[" * 10**6, '{"a":' * 10**6, "[" * 10**5 + "]" * 10**5, '{"a":' * 300 + "1" + "}" * 300]
WRONG_JSON = [
    "",
    " ",
    "{",
    "\ufeff{}",
    '{"a":"\ud800"}',
    '{"a":"\0"}',
    "{}x",
    "9" * 5000,
    "'a'",
    "/**/1",
]


@pytest.mark.parametrize("text", DEEP_JSON + WRONG_JSON, ids=lambda text: ascii(text)[:16])
def test_json_that_is_none_is_one_sentence_that_repeats_nothing(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"^not valid JSON: ") as refused:
        parse_json(text)
    assert ("nested too deep" in str(refused.value)) is (text in DEEP_JSON)
    path = tmp_path / "it"
    path.write_bytes(text[: LIMIT_BYTES // 2].encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match=r"the list .* is not valid JSON"):
        file_at(path).read_json()


def test_numbers_that_are_none_are_read_from_files_only(tmp_path: Path) -> None:
    text = '{"a": NaN, "b": -Infinity, "c": 1e999, "d": 1, "d": 2}'
    (tmp_path / "it").write_text(text)
    found = file_at(tmp_path / "it").read_json()
    assert (str(found["a"]), found["b"], found["c"], found["d"]) == ("nan", -float("inf"), float("inf"), 2)
    with pytest.raises(ValueError, match="not valid JSON"):
        parse_json(text)


@given(
    st.lists(st.sampled_from(["\ud83d", "\ude00", "😀", "\u0120", "\ud7ff", "\\", "u", "d83d", '"', "\n"]), max_size=8)
)
def test_halves_of_surrogate_pairs_are_read_from_files_only_as_no_character(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    """Oracle: Python's parser, which takes them."""
    path = tmp_path_factory.getbasetemp() / "surrogates"
    path.write_text(json.dumps("".join(parts)))
    read = json.loads(path.read_text())
    whole = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in read)
    assert file_at(path).read_json() == whole
    if whole != read:
        with pytest.raises(ValueError, match="not valid JSON"):
            parse_json(path.read_text())


def test_more_parts_than_allowed_are_not_parsed() -> None:
    assert parse_json('[[],"a",{}]', max_parts=4) == [[], "a", {}]
    for text in ('[[],"a",{}]', b"[" + b"[]," * 10**6 + b"[]]"):
        with pytest.raises(TooManyPartsError, match="more than 3 arrays"):
            parse_json(text, max_parts=3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a=" + "[" * 10**5, "nested too deep"),
        ("a=" + "{a=" * 10**5, "nested too deep"),
        ("[" + "a." * 400 + "a]", "nested too deep"),
        ("a" + ".a" * MAX_TOML_DEPTH + "=1", "nested too deep"),
        ("a" + ".a" * 2 * 10**5 + "=1", "too many dots"),
        ("\n".join(f"k{index}" + ".a" * 200 + "=1" for index in range(500)), "too many dots"),
        ("a=" + "9" * 5000, "too many digits"),
        ("a=0x" + "f" * 5000, "more than 64 bits"),
        (f"a={2**63}", "more than 64 bits"),
        ('a=["b", "c\\u0000"]', "NUL character"),
        ('"a\\u0000"=1', "NUL character"),
        ("a=1\na=2", "Cannot overwrite"),
    ],
)
def test_toml_that_is_none_is_one_sentence(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        parse_toml(text)
    assert "\n" not in str(refused.value)


def test_toml_within_the_limits_is_read() -> None:
    assert parse_toml(f'a.b.c = {2**63 - 1}\nd = [[1, -0.0, nan], "e.f.g"]')["a"] == {"b": {"c": 2**63 - 1}}
    assert parse_toml("a" + ".a" * (MAX_TOML_DEPTH - 1) + "=1")
