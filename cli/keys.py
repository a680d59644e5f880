"""`sluice keys`: makes a key, shown once, and the lines of the file that let it in; lists them; takes them back."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from shared.api_keys import MAX_KEYS_BYTES, TENANT_NAME, Scope, Tier, hash_key, make_key
from shared.errors import StartupError
from shared.reading import InputFile

_LIMIT = click.IntRange(min=1)
ID_LENGTH: Final = 12
"""Digits of a key's SHA-256 by which people name it."""
REVOKE_EPILOG: Final = """\b
Examples:
  sluice keys list --file keys.toml                   which keys there are
  sluice keys revoke 3f0a91c4d5e6 --file keys.toml
"""


@click.group()
def keys() -> None:
    """Make API keys, list them, and take them back."""


@keys.command()
@click.option("--tenant", required=True, metavar="NAME", help="Whose key it is; limits and cached prompts are shared.")
@click.option("--scopes", metavar="NAME,…", default="infer", show_default=True, help=f"Of {', '.join(Scope)}.")
@click.option("--tier", type=click.Choice([tier.label for tier in Tier]), help="Most urgent tier. [default]")
@click.option("--requests-per-min", metavar="N", type=_LIMIT, help="Each choice counts. [no limit]")
@click.option("--tokens-per-min", metavar="N", type=_LIMIT, help="Prompts, and max_tokens of each choice. [no limit]")
@click.option("--max-concurrent", metavar="N", type=_LIMIT, help="Choices at a time. [no limit]")
@click.option("--max-queued", metavar="N", type=click.IntRange(min=0), help="Of these, waiting for room. [no limit]")
@click.option("--file", "path", type=click.Path(path_type=Path), help="Add it here; it is made if it does not exist.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def create(*, tenant: str, scopes: str, path: Path | None, as_json: bool, **of_tenant: Any) -> int:
    """Make a key, and print it: it is stored nowhere, the file holds its SHA-256 only.

    With --file the key is all that is printed; without, the lines for the file follow. A running dispatcher reads its
    file (--api-keys-file) again within two seconds. `sluice keys revoke` takes a key back.
    """
    settings = {name: value for name, value in of_tenant.items() if value is not None}
    key = make_key()
    entry = _key_lines(key, tenant, _scopes(scopes))
    known = _tenants_in(path) if path is not None else {}
    if tenant in known and settings:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in settings)
        raise StartupError(f"{path} has a tenant '{tenant}' already", f"Change it there, or leave out {flags}")
    if tenant not in known:
        entry = _tenant_lines(tenant, settings) + "\n" + entry
    if path is not None:
        _append(path, entry)
    if as_json:
        digest = hash_key(key)
        click.echo(json.dumps({"key": key, "id": digest[:ID_LENGTH], "tenant": tenant, "entry": entry}))
    elif path is None:
        click.echo(
            f"{key}\n\n# this is shown once; what follows belongs into the file of --api-keys-file\n{entry}", nl=False
        )
    else:
        click.echo(key)
    return 0


_file = click.option(
    "--file", "path", type=click.Path(path_type=Path), required=True, help="File of keys (--api-keys-file)."
)


@keys.command("list")
@_file
@click.option("--json", "as_json", is_flag=True, help="One line of JSON.")
def list_keys(*, path: Path, as_json: bool) -> int:
    """Show the keys of a file: the beginning of each one's SHA-256, whose it is, and what it may do."""
    rows = [{"id": each["sha256"][:ID_LENGTH], **each} for each in _keys_of(_read(path), path)]
    if as_json:
        click.echo(json.dumps(rows))
    for row in () if as_json else rows:
        click.echo(f"{row['id']}  {row.get('tenant', '')}  {','.join(row.get('scopes', ()))}")
    return 0


@keys.command(epilog=REVOKE_EPILOG)
@click.argument("key", metavar="ID|KEY")
@_file
def revoke(*, key: str, path: Path) -> int:
    """Take a key back: its lines are removed from the file, which a running dispatcher reads again within two seconds.

    It is named by itself, or by the beginning of its SHA-256 as `sluice keys list` shows it. What a tenant has as its
    limits stays. A file's only key stays, too: make another one first.
    """
    before = _read(path)
    found = _keys_of(before, path)
    meant = [each for each in found if each["sha256"] == hash_key(key) or each["sha256"].startswith(key.lower())]
    if len(meant) != 1:
        problem = f"{len(meant)} keys begin so" if meant else "there is no such key"
        raise StartupError(f"{problem} in {path}", f"`sluice keys list --file {path}` shows those there are")
    if len(found) == 1:
        problem = f"it is the only key in {path}, and dispatchers keep to the last file that has one"
        raise StartupError(problem, "Make another one first, or end the cluster")
    after = _without(before, meant[0]["sha256"])
    if after is None or _keys_of(after, path) != [each for each in found if each is not meant[0]]:
        raise StartupError(f"{path} is not written as `sluice keys create` does it", "Remove the key's lines by hand")
    _replace(path, after)
    click.echo(f"took back {meant[0]['sha256'][:ID_LENGTH]} of {meant[0].get('tenant', '')}; {len(found) - 1} are left")
    return 0


def _read(path: Path) -> str:
    """Return a file of keys as text.

    Raises:
        StartupError: there is none, or it is no TOML.
    """
    file = InputFile(path, MAX_KEYS_BYTES, "the file of keys", "Name another one with --file")
    file.read_toml()
    return path.read_text(encoding="utf-8")


def _keys_of(text: str, path: Path) -> list[dict[str, Any]]:
    """Return the entries of a file of keys.

    Raises:
        StartupError: they are none.
    """
    entries: Any = tomllib.loads(text).get("keys", [])
    are_tables = isinstance(entries, list) and all(isinstance(each, dict) for each in entries)
    if not are_tables or not all(isinstance(each.get("sha256"), str) for each in entries):
        raise StartupError(f"{path} is no file of keys", "Name another one with --file")
    return list(entries)


def _without(text: str, digest: str) -> str | None:
    """Return a file's text without the table of a key, but with what is said between tables; None: it has none."""
    tables = re.split(r"^(?=[ \t]*\[)", text, flags=re.MULTILINE)
    its = [each for each in tables if each.lstrip().startswith("[[keys]]") and f'"{digest}"' in each]
    if len(its) != 1:
        return None
    said = re.search(r"(?:^[ \t]*(?:#.*)?\n)*\Z", its[0], flags=re.MULTILINE)
    assert said is not None, "nothing, at least"
    return text.replace(its[0], said[0])


def _replace(path: Path, text: str) -> None:
    """Write a file anew at once, with the rights that it had."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:  # noqa: PTH123  a descriptor, whose mode matters
            file.write(text.encode())
        draft.chmod(path.stat().st_mode & 0o7777)
        draft.replace(path)
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}", "Remove the key's lines by hand") from None
    finally:
        draft.unlink(missing_ok=True)


def _scopes(text: str) -> list[str]:
    """Return the scopes, each once.

    Raises:
        StartupError: one does not exist, or none is named.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in list(Scope)]
    if unknown or not names:
        problem = f"there is no scope '{unknown[0][:64]}'" if unknown else "no scope is named"
        raise StartupError(problem, f"Choose from {', '.join(Scope)}")
    return names


def _tenants_in(path: Path) -> Mapping[str, Any]:
    """Return the tenants of a file, none if there is no file.

    Raises:
        StartupError: it cannot be read.
    """
    file = InputFile(path, MAX_KEYS_BYTES, "the file of keys", "Name another one with --file")
    tenants = file.read_toml().get("tenants", {}) if file.exists() else {}
    return tenants if isinstance(tenants, dict) else {}


def _tenant_lines(name: str, settings: Mapping[str, Any]) -> str:
    if not TENANT_NAME.match(name):
        raise StartupError(f"'{name[:64]}' is no name for a tenant", "Use 1 to 64 letters, digits, '.', '_' or '-'")
    values = [
        f"{key} = {value!r}" if isinstance(value, int) else f'{key} = "{value}"' for key, value in settings.items()
    ]
    return "\n".join([f'[tenants."{name}"]', *values]) + "\n"


def _key_lines(key: str, tenant: str, scopes: Sequence[str]) -> str:
    listed = ", ".join(f'"{scope}"' for scope in scopes)
    return f'[[keys]]\nsha256 = "{hash_key(key)}"\ntenant = "{tenant}"\nscopes = [{listed}]\n'


def _append(path: Path, entry: str) -> None:
    """Add lines to the file with one write, so that whoever reads it meanwhile sees all of them or none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "ab", buffering=0) as file:  # noqa: PTH123  a descriptor, whose mode matters
            file.write(f"\n{entry}".encode())
    except OSError as error:
        raise StartupError(f"{path} cannot be written: {error.strerror}", "Name another one with --file") from None
