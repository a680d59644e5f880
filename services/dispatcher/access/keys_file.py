"""The file of keys: TOML with tenants and digests, never a key itself.

[tenants.acme]
tier = "default"
requests_per_min = 600

[[keys]]
sha256 = "…64 digits…"
tenant = "acme"
scopes = ["infer"]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from services.dispatcher.access.grants import Grant, Tenant, TenantLimits, grant_of_tenant
from shared.api_keys import MAX_KEYS_BYTES, TENANT_NAME, Scope, Tier, check_digest, hash_key
from shared.errors import ConfigError
from shared.process.log import get_logger
from shared.reading import InputFile, parse_toml

_log = get_logger()

DEFAULT_TENANT: Final = Tenant("default", Tier.PRIORITY)
"""Whose the single key of `--api-key` is."""
DEFAULT_SCOPES: Final = frozenset({Scope.INFER, Scope.METRICS})
_HINT: Final = "Make entries with `sluice keys create`"
_Limit = Annotated[int | None, Field(ge=1, le=10**12)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Tenant(_Entry):
    tier: Literal["flex", "default", "priority"] = "default"
    requests_per_min: _Limit = None
    tokens_per_min: _Limit = None
    max_concurrent: _Limit = None
    max_queued: Annotated[int | None, Field(ge=0, le=10**6)] = None


class _Key(_Entry):
    sha256: Annotated[str, AfterValidator(check_digest)]
    tenant: str
    scopes: Annotated[list[Literal["infer", "batch", "admin", "metrics"]], Field(min_length=1, max_length=4)]


class _File(_Entry):
    tenants: dict[str, _Tenant] = Field(default_factory=dict)
    keys: Annotated[list[_Key], Field(min_length=1)]


def read_keys(path: Path, kept: Path | None = None) -> dict[str, Grant]:
    """Return the grants of every key in the file, by digest (`hash_key`).

    Args:
        path: of the file.
        kept: where to keep a copy of it if it is good; None: nowhere.

    Raises:
        ConfigError: it cannot be read, or is not what this module's docstring shows.
    """
    file = InputFile(path, MAX_KEYS_BYTES, "the file of keys", _HINT, ConfigError)
    text = file.read_text()
    try:
        grants = _ring(_File.model_validate(parse_toml(text)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        why = first.get("ctx", {}).get("error", first["msg"])
        raise ConfigError(f"the file of keys {path} is wrong at '{where}': {why}", _HINT, "keys_file") from None
    except ValueError as error:  # also TOML that is none
        raise ConfigError(f"the file of keys {path} is wrong: {error}", _HINT, "keys_file") from None
    if kept is not None:
        _keep(kept, text.encode())
    return grants


def _keep(kept: Path, data: bytes) -> None:
    """Put the data there for its owner alone; what was there stays if that is not possible."""
    draft = kept.with_name(kept.name + ".new")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        draft.replace(kept)
    except OSError as error:
        _log.warning("keys_not_kept", path=str(kept), problem=error.strerror, meaning="a restart needs the file itself")


def _ring(file: _File) -> dict[str, Grant]:
    """Return the grants by digest.

    Raises:
        ValueError: a tenant has no name that can be one, a key has no tenant, or stands there twice.
    """
    for name in file.tenants:
        if not TENANT_NAME.match(name):
            raise ValueError(f"'{name[:64]}' is no name for a tenant (1 to 64 letters, digits, '.', '_', '-')")
    tenants = {name: _tenant(name, entry) for name, entry in file.tenants.items()}
    ring: dict[str, Grant] = {}
    for index, key in enumerate(file.keys):
        if key.tenant not in tenants:
            raise ValueError(
                f"keys.{index} belongs to '{key.tenant[:64]}', but there is no [tenants.{key.tenant[:64]}]"
            )
        if key.sha256 in ring:
            raise ValueError(f"keys.{index} stands there twice")
        ring[key.sha256] = grant_of_tenant(tenants[key.tenant], frozenset(Scope(scope) for scope in key.scopes))
    return ring


def _tenant(name: str, entry: _Tenant) -> Tenant:
    limits = TenantLimits(entry.requests_per_min, entry.tokens_per_min, entry.max_concurrent, entry.max_queued)
    return Tenant(name, Tier[entry.tier.upper()], limits)


def single_key(key: str) -> dict[str, Grant]:
    """Return the grant of the key that `--api-key` names; none if it names none."""
    return {hash_key(key): grant_of_tenant(DEFAULT_TENANT, DEFAULT_SCOPES)} if key else {}
