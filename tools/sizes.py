"""Measures Python code by folder: `python -m tools.sizes [--path FOLDER | --commit REV [REV]] [--outside PATH…]`.

Code lines have something on them that is no comment and no docstring (nor a string that describes a field). With two
commits it prints how many code lines came and went in each top folder. With `--check` it says instead which files,
classes and functions are longer, with all their lines, than anybody should have to read, but for those in `ALLOWED`.
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


MAX_FILE, MAX_TEST_FILE, MAX_CLASS, MAX_FUNCTION = 400, 600, 250, 60
"""Lines, blanks, comments and docstrings among them."""
MAX_PARAMETERS, MAX_PARTS = 6, 8
"""Of a function; of a constructor, which may join parts. Triton's kernels are given every address by itself."""
ALLOWED = {
    "services/dispatcher/session/session.py::Session": "a token's way: a cut costs a call for each part",
    "services/planner/service.py::Planner": "one writer of plans: its loop, its claim and its endpoints",
    "services/worker/build.py::build_worker": "one argument for each part that a worker is joined from",
    "services/worker/engine/engine.py::Engine": "the step machine: most of it says what its parts are",
    "services/worker/executor/elastic_model.py::ElasticModel": "one owner of parameters and what is loaded of them",
    "services/worker/executor/kernels.py::open": "one argument for each part that kernels are joined from",
    "services/worker/executor/kernels.py::graphs": "what is recorded, and how",
    "shared/token_batch.py::stream_batch": "one argument for each column of the hot message",
    "tests/support/plan_workers.py::PlanWorker": "a worker's whole side of the protocol of plans",
    "tests/unit/sim/test_group_conservation.py::Life": "everything that can happen to a group, as rules of one machine",
}
"""What is longer, and why; nothing of it has more than 500 lines, and there are ten at the most."""


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


def too_long(path: Path, text: str) -> dict[str, str]:
    """Return what exceeds the limits in one file, by name, and by how much."""
    lines, is_test = text.count("\n"), path.parts[0] == "tests"
    found = {str(path): f"{lines} lines"} if lines > (MAX_TEST_FILE if is_test else MAX_FILE) else {}
    is_kernel = path.name.endswith("_kernels.py") and "fused" in path.parts
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines, name = (node.end_lineno or 0) - node.lineno + 1, f"{path}::{node.name}"
        if lines > (MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION) and not is_kernel:
            found[name] = f"{lines} lines"
        if isinstance(node, ast.ClassDef) or is_test or is_kernel:
            continue
        given = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len(given) - (given[:1] in (["self"], ["cls"]))
        if count > (MAX_PARTS if node.name == "__init__" else MAX_PARAMETERS):
            found[name] = f"{count} parameters"
    return found


def check(root: Path) -> list[str]:
    """Return a line for what is too long and not allowed, and for what is allowed and not too long."""
    found: dict[str, str] = {}
    for path in sorted(root.rglob("*.py")):
        if not any(part.startswith(".") for part in path.relative_to(root).parts):
            found |= too_long(path.relative_to(root), path.read_text(encoding="utf-8"))
    lines = [f"{name}: {said}" for name, said in found.items() if name not in ALLOWED]
    return lines + [f"{name}: is within the limits, and needs no exception" for name in ALLOWED if name not in found]


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
    parser.add_argument("--check", action="store_true", help="say what is too long, and end with 1 if anything is")
    given = parser.parse_args()
    if given.check:
        lines = check(given.path)
        raise SystemExit("\n".join(lines) if lines else 0)
    measured = [measure_commit(revision, given.outside) for revision in given.commit or ()]
    if len(measured) > 1:
        print(difference(*measured))
    else:
        print(table(measured[0] if measured else measure(given.path, given.outside)))


if __name__ == "__main__":
    main()
