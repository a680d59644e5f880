"""Measures Python code by folder: `python -m tools.sizes [--path FOLDER | --commit REV [REV]] [--outside PATH…]`.

Code lines have something on them that is no comment and no docstring (nor a string that describes a field). With two
commits it prints how many code lines came and went in each top folder.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import tarfile
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@dataclass(frozen=True, slots=True)
class FileSize:
    """What one file adds to the figures; sizes are code lines."""

    path: Path
    num_lines: int
    classes: list[int]
    functions: list[int]
    num_public: int
    """Classes, functions and methods without an underscore before their name."""
    num_described: int
    """Those of them that have a docstring."""


def measure_file(path: Path, text: str) -> FileSize:
    """Measure one file's text."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = [node for node in [*classes, *functions] if not node.name.startswith("_")]
    return FileSize(
        path,
        len(lines),
        [len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))) for node in classes],
        [len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))) for node in functions],
        len(public),
        sum(ast.get_docstring(node) is not None for node in public),
    )


def measure(root: Path, outside: Iterable[str] = ()) -> list[FileSize]:
    """Measure every Python file under a folder but hidden ones, and those whose path begins with one of `outside`."""
    skipped = tuple(outside)
    sizes = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not any(part.startswith(".") for part in inside.parts) and not str(inside).startswith(skipped):
            sizes.append(measure_file(inside, path.read_text(encoding="utf-8")))
    return sizes


def p90(values: Sequence[int]) -> int:
    """Return the smallest value that nine tenths of the values do not exceed; 0 for none."""
    return sorted(values)[-(-len(values) * 9 // 10) - 1] if values else 0


def table(sizes: Sequence[FileSize]) -> str:
    """Return the figures of every folder, and of all, as a table in Markdown."""
    folders: dict[str, list[FileSize]] = defaultdict(list)
    for size in sizes:
        folders[str(size.path.parent)].append(size)
    head = ("folder", "code lines", "files", "longest class", "p90 file", "p90 function", "docstrings per public name")
    rows = [_row(name, folders[name]) for name in sorted(folders)]
    return _markdown([head, ("---", *["---:"] * (len(head) - 1)), *rows, _row("all", sizes)])


def _row(name: str, sizes: Sequence[FileSize]) -> tuple[object, ...]:
    num_public = sum(size.num_public for size in sizes)
    described = f"{sum(size.num_described for size in sizes) / num_public:.3f}" if num_public else "-"
    classes = [lines for size in sizes for lines in size.classes]
    functions = [lines for size in sizes for lines in size.functions]
    files = [size.num_lines for size in sizes]
    return name, sum(files), len(files), max(classes, default=0), p90(files), p90(functions), described


def difference(before: Iterable[FileSize], after: Iterable[FileSize]) -> str:
    """Return the code lines of every top folder before and after, as a table in Markdown."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for column, sizes in enumerate((before, after)):
        for size in sizes:
            for name in (size.path.parts[0], "all"):
                counts[name][column] += size.num_lines
    names = sorted(counts, key=lambda name: (name == "all", name))
    rows = [(name, *counts[name], f"{counts[name][1] - counts[name][0]:+d}") for name in names]
    return _markdown([("folder", "before", "after", "difference"), ("---", "---:", "---:", "---:"), *rows])


def _markdown(rows: Iterable[Iterable[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def measure_commit(revision: str, outside: Iterable[str]) -> list[FileSize]:
    """Measure the files of a commit of the repository that this runs in."""
    archive = subprocess.run(["git", "archive", revision], capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
        return measure(Path(folder), outside)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--path", type=Path, default=Path(), help="measure this folder")
    parser.add_argument("--commit", nargs="+", metavar="REV", help="measure a commit, or compare two")
    parser.add_argument("--outside", nargs="*", default=[], metavar="PATH", help="leave out what begins with these")
    given = parser.parse_args()
    measured = [measure_commit(revision, given.outside) for revision in given.commit or ()]
    if len(measured) > 1:
        print(difference(*measured))
    else:
        print(table(measured[0] if measured else measure(given.path, given.outside)))


if __name__ == "__main__":
    main()
