"""`sluice keys create`: a key for a tenant, shown once, and the lines of the file that let it in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from shared.api_keys import MAX_KEYS_BYTES, TENANT_NAME, Scope, Tier, hash_key, make_key
from shared.errors import StartupError
from shared.reading import InputFile

_LIMIT = click.IntRange(min=1)


@click.group()
def keys() -> None:
    """Make API keys."""


@keys.command()
@click.option("--tenant", required=True, metavar="NAME", help="Whose key it is; limits and cached prompts are shared.")
@click.option("--scopes", metavar="NAME,…", default="infer", show_default=True, help=f"Of {', '.join(Scope)}.")
@click.option("--tier", type=click.Choice([tier.label for tier in Tier]), help="Most urgent tier. [default]")
@click.option("--requests-per-min", metavar="N", type=_LIMIT, help="Each choice counts. [no limit]")
@click.option("--tokens-per-min", metavar="N", type=_LIMIT, help="Prompts, and max_tokens of each choice. [no limit]")
@click.option("--max-concurrent", metavar="N", type=_LIMIT, help="Choices at a time. [no limit]")
@click.option("--max-queued", metavar="N", type=click.IntRange(min=0), help="Of these, waiting for room. [no limit]")
@click.option("--file", "path", type=click.Path(path_type=Path), help="Add it here; it is made if it does not exist.")
def create(*, tenant: str, scopes: str, path: Path | None, **of_tenant: Any) -> int:
    """Make a key, and print it: it is stored nowhere, the file holds its SHA-256 only.

    With --file the key is all that is printed; without, the lines for the file follow. A running dispatcher reads its
    file (--api-keys-file) again within two seconds. To take a key back, remove its lines.
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
    if path is None:
        click.echo(
            f"{key}\n\n# this is shown once; what follows belongs into the file of --api-keys-file\n{entry}", nl=False
        )
        return 0
    _append(path, entry)
    click.echo(key)
    return 0


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
