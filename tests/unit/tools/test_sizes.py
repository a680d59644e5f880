"""Code lines are counted without blanks, comments and docstrings, by folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.sizes import ALLOWED, check, difference, measure, p90, table

ROOM = '''"""What a room is.

Two lines more.
"""

import os  # a comment beside code


class Room:
    """A class."""

    size: int = 1
    """A field's description."""

    # a comment alone
    def path(self) -> str:
        text = """a string
        of two lines"""
        return os.path.join(text, "#")

    def _hidden(self) -> None: ...
'''


def make_tree(folder: Path) -> Path:
    for name, text in {
        "a/room.py": ROOM,
        "a/b/one.py": "x = 1\n",
        "b/two.py": "x = 1\n\ny = 2\n",
        ".v/no.py": "x",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_code_lines_are_those_with_code(tmp_path: Path) -> None:
    """room.py: import, class, size, def, three lines of body, def = 8; of it the class 7, `path` 4. Of the public names
    Room and path, one has a docstring.
    """
    room = {str(size.path): size for size in measure(make_tree(tmp_path))}["a/room.py"]
    assert (room.num_lines, room.classes, room.functions) == (8, [7], [4, 1])
    assert (room.num_public, room.num_described) == (2, 1)


def test_the_table_has_a_row_for_each_folder_and_one_for_all(tmp_path: Path) -> None:
    rows = table(measure(make_tree(tmp_path))).splitlines()[2:]
    assert rows == [
        "| a | 8 | 1 | 7 | 8 | 4 | 0.500 |",
        "| a/b | 1 | 1 | 0 | 1 | 0 | - |",
        "| b | 2 | 1 | 0 | 2 | 0 | - |",
        "| all | 11 | 3 | 7 | 8 | 4 | 0.500 |",
    ]


def test_a_difference_is_by_top_folder(tmp_path: Path) -> None:
    """Without a/b, one code line less in a."""
    tree = make_tree(tmp_path)
    rows = difference(measure(tree), measure(tree, outside=["a/b"])).splitlines()[2:]
    assert rows == ["| a | 9 | 8 | -1 |", "| b | 2 | 2 | +0 |", "| all | 11 | 10 | -1 |"]


def test_nine_tenths_do_not_exceed_p90() -> None:
    """Of 1 to 20, 18 values are 18 at most; of one value, itself."""
    assert (p90(range(1, 21)), p90([7]), p90([])) == (18, 7, 0)


@pytest.mark.parametrize(
    ("path", "text", "said"),
    [
        ("a.py", "x = 1\n" * 401, "a.py: 401 lines"),
        ("a.py", "class Wide:\n" + "    x = 1\n" * 250, "a.py::Wide: 251 lines"),
        ("a.py", "def far() -> None:\n" + "    x = 1\n" * 60, "a.py::far: 61 lines"),
        ("a.py", "def many(a, b, c, d, e, f, g): ...\n", "a.py::many: 7 parameters"),
        ("a.py", "class A:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...\n", "a.py::__init__: 9 parameters"),
        ("tests/a.py", "x = 1\n" * 600, None),
        ("fused/a_kernels.py", "def many(a, b, c, d, e, f, g): ...\n", None),
    ],
)
def test_what_is_too_long_is_said_by_name(tmp_path: Path, path: str, text: str, said: str | None) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(text)
    needless = [f"{name}: is within the limits, and needs no exception" for name in ALLOWED]
    assert check(tmp_path) == [*([said] if said else []), *needless]


def test_exceptions_are_few_and_not_boundless() -> None:
    assert len(ALLOWED) <= 10
    assert all(ALLOWED.values())
