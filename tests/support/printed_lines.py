"""Every command that people are told to type, collected from where it is told: documents, help texts, strings in code.

A new page, example or hint is found by itself. What a line means by a name (`NAME`, `…`, `/path/to/model`) is not known
here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from cli.main import cli

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = sorted([ROOT / "README.md", ROOT / "client" / "README.md", *ROOT.glob("docs/**/*.md")])
CODE: Final = ("cli", "services", "shared", "sim", "client", "benchmarks", "tools")
_PROGRAMS: Final = (
    "cargo", "curl", "docker", "docker-compose", "jq", "kill", "make", "nats", "nats-server", "nginx", "node", "npm",
    "perf", "pip", "pip3", "py-spy", "pytest", "python", "python3", "python3.11", "sluice", "ulimit",
)  # fmt: skip
"""Which words begin a command; of these the pages may also speak, so that one alone is a name."""
_START: Final = re.compile(
    rf"(?:\$ )?(?:[A-Z][A-Z_]*=\S+ +)*(?:\.venv/bin/)?(?:{'|'.join(re.escape(each) for each in _PROGRAMS)})(?: +\S|$)"
)
_OPENED: Final = re.compile(f"`{_START.pattern}")
_ALONE: Final = re.compile(r"^[\w./-]+$")
_QUOTED: Final = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Line:
    """One command as it is told."""

    text: str
    """Without a prompt, a comment or an explanation beside it."""
    place: str
    """File of the document or code, or the command whose help it is."""
    kind: str = "sh"
    """`sh`, or the language of a fenced block that is run as a whole."""

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


def is_command(text: str) -> bool:
    """Return whether a text is a command, and not the name of a program alone."""
    return bool(_START.match(text)) and not _ALONE.match(text)


def collect() -> list[Line]:
    """Return every line, each once for each place."""
    found = [*of_pages(), *of_help(), *of_code()]
    return list(dict.fromkeys(found))


def of_pages() -> Iterator[Line]:
    """Give what stands in blocks and between backticks of pages."""
    for page in PAGES:
        place = str(page.relative_to(ROOT))
        prose, language, block = [], None, list[str]()
        for row in page.read_text(encoding="utf-8").splitlines():
            fence = re.match(r" *```(\w*)", row)
            if fence and language is None:
                language, block = fence[1], []
            elif fence:
                yield from _of_block(block, str(language), place)
                language = None
            elif language is not None:
                block.append(row)
            elif re.match(r" {4,}\S", row):
                yield from _of_block([row.strip()], "", place)
            else:
                prose.append(row)
        yield from _of_prose(" ".join(prose), place)


def _of_block(rows: list[str], language: str, place: str) -> Iterator[Line]:
    if language in ("python", "js", "html"):
        yield Line("\n".join(rows), place, language)
        return
    for row in _joined(rows):
        text = row.removeprefix("$ ").strip()
        if row.startswith("$ ") or is_command(text) or text.startswith("sign_in"):
            yield Line(_told(text), place)


def _joined(rows: list[str]) -> Iterator[str]:
    """Give rows, one that ends by a backslash, or within a quotation, with those after it."""
    whole = ""
    for row in rows:
        whole = f"{whole} {row.strip()}" if whole else row
        if whole.endswith("\\"):
            whole = whole[:-1].rstrip()
        elif not whole.startswith("$ ") or whole.count("'") % 2 == 0:
            yield whole
            whole = ""
    if whole:
        yield whole


def _told(text: str) -> str:
    """Return a command without the comment behind it, or the explanation that two spaces set apart."""
    text = re.sub(r"(?<=;) +", " ", text.split("  #")[0].strip())
    return re.split(r" {2,}(?=[^-'\" ])", text)[0].strip()


def _of_prose(text: str, place: str) -> Iterator[Line]:
    for quoted in _QUOTED.findall(text):
        if is_command(quoted):
            yield Line(quoted.strip(), place)


def of_help() -> Iterator[Line]:
    """Give the examples and the commands between backticks of every help."""
    for path, command in _commands(cli, "sluice"):
        with click.Context(command, info_name=path, max_content_width=200) as context:
            text = command.get_help(context)
        for row in text.partition("Examples:")[2].splitlines():
            if is_command(row.strip()):
                yield Line(_told(row.strip()), f"{path} --help")
        yield from _of_prose(" ".join(text.split()), f"{path} --help")


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            if not below.hidden:  # another name of one that is not
                yield from _commands(below, f"{path} {name}")


def of_code() -> Iterator[Line]:
    """Give the commands between backticks in strings that are no docstrings; an expression of an f-string is `{…}`."""
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if not _OPENED.search(source):
                continue
            tree = ast.parse(source)
            silent = _docstrings(tree)
            inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in ast.walk(tree):
                if id(node) not in silent and id(node) not in inner and (text := _string(node)):
                    yield from _of_prose(text, str(path.relative_to(ROOT)))


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the strings that stand by themselves: docstrings of modules, functions and names."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


def _string(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else f"{{{ast.unparse(part)}}}" for part in node.values]
        return "".join(str(part) for part in parts)
    return ""
