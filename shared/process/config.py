"""Typed settings: flag, then environment variable, then `sluice.toml`, then default.

Nothing else in the project reads the environment.

For a field `max_model_len` of section `worker`, the first of these that is given wins:

    --max-model-len 4096                     flag
    SLUICE_WORKER_MAX_MODEL_LEN=4096         environment; an empty variable counts as not given
    [worker]                                 ./sluice.toml
    max_model_len = 4096
    the field's default

The fields of `ServiceSettings` belong to every service, so they are read from `SLUICE_<FIELD>` and from the top of the
file too, after the section's own; the broker also from `NATS_URL`. Section `""` is `sluice up`: its fields stand at the
top. Whatever is unknown (a flag, a variable of the section, a key, a table) is refused with the nearest known name; a
bad value is refused with the place where it stands and what is allowed there. A service does not know the names that
`sluice up` reads at the top, so there it refuses only what is almost a name of its own.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.addresses import check_broker_urls, normal_host
from shared.api_keys import check_key
from shared.browsers import check_host_name, check_origin
from shared.errors import ConfigError
from shared.host import is_first_process
from shared.process.config_fields import AUTO, SizeType, allowed_text, field_type, flag_name, help_text, parse_size
from shared.process.config_sources import Given, Schema, check_texts, read_env, read_flags, read_toml, split_values
from shared.reading import InputFile
from shared.subjects import check_token

__all__ = [
    "ApiKey",
    "ConfigError",
    "Host",
    "HostNames",
    "ModelNames",
    "Origins",
    "ReasoningParser",
    "ServiceSettings",
    "Settings",
    "Size",
    "ToolParser",
    "load",
    "parse_size",
]

CONFIG_FILE: Final = Path("sluice.toml")
"""Read from the working directory if it exists."""

MAX_PASSWORD_BYTES: Final = 64 * 1024
"""Largest file of a password."""

Size = Annotated[int, BeforeValidator(parse_size), SizeType()]
"""Bytes, written as `512MiB`, `2GiB`, `1.5GiB` or a plain number."""

Host = Annotated[str, AfterValidator(normal_host)]
"""Address or name of a host, as `shared.addresses.normal_host` writes it."""

SubjectToken = Annotated[str, AfterValidator(check_token)]
"""Text that may be one token of a bus subject."""


ApiKey = Annotated[str, AfterValidator(check_key), Field(repr=False)]
"""One key of the API, or "" for none."""


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names without repetition; each has 1 to 256 printable characters and no space at its ends."""
    for name in names:
        if not 1 <= len(name) <= 256 or not name.isprintable() or name != name.strip():
            raise ValueError(f"'{name[:80]}' is no name for a model (allowed: 1 to 256 printable characters)")
    return tuple(dict.fromkeys(names))


def _split_names(value: object) -> object:
    """Return the names of a text with commas; what was given, but names nothing, is a slip and not the default."""
    names = split_values(value) if isinstance(value, str) else value
    if names == [] and value != "":
        raise ValueError("no name is given (write at least one, or leave the setting out)")
    return names


ModelNames = Annotated[
    tuple[str, ...],
    BeforeValidator(_split_names),
    AfterValidator(_check_names),
    Field(max_length=64),
]
"""Names under which one model is served, written with commas; answers carry the first."""

ReasoningParser = Literal["auto", "none", "qwen3", "deepseek_r1"]
"""How a model's thinking is found in its answers; `auto`: by its chat template."""

ToolParser = Literal["auto", "none", "hermes", "llama3", "mistral", "phi"]
"""How a model's calls of tools are found in its answers; `auto`: by its chat template."""

HostNames = Annotated[tuple[Annotated[str, AfterValidator(check_host_name)], ...], BeforeValidator(_split_names)]
"""Names of this host, written with commas."""

Origins = Annotated[tuple[Annotated[str, AfterValidator(check_origin)], ...], BeforeValidator(_split_names)]
"""Origins of pages, as `shared.browsers.normal_origin` writes them, or `*`; written with commas."""


def default_instance_id() -> str:
    """Return an id that no other process on the network has now: host name and process id, fit for a subject.

    The first process of a container has the container's name, which it keeps when it starts again.
    """
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:40] or "host"
    return host if is_first_process() else f"{host}-{os.getpid()}"


def visible_devices() -> list[str] | None:
    """Return the CUDA devices that the environment leaves to this process; None: all that there are."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else split_values(text)


def read_password(path: Path, hint: str) -> str:
    """Return the first line of a file.

    Args:
        path: of the file.
        hint: what to do if it is wrong.

    Raises:
        ConfigError: it cannot be read, or the line is empty.
    """
    file = InputFile(path, MAX_PASSWORD_BYTES, "the password in", hint, ConfigError)
    password = file.read_text().partition("\n")[0].strip()
    if not password:
        raise file.error("is empty")
    return password


class Settings(BaseModel):
    """Settings of one program: frozen, unknown keys refused. The line under each field is what `--help` prints."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )


class ServiceSettings(Settings):
    """What every service needs."""

    cluster: SubjectToken = "default"
    """Name of the cluster; clusters that share a broker do not see each other."""
    nats_url: Annotated[str, AfterValidator(check_broker_urls)] = "nats://127.0.0.1:4222"
    """Where the NATS server listens; several servers of one NATS cluster with commas."""
    nats_user: str = ""
    """User at the NATS server; empty: the one in the URL, or none."""
    nats_password: Annotated[str, Field(repr=False)] = ""
    """The user's password; better given by environment or file than as a flag, which other users of the machine see."""
    nats_password_file: Path | None = None
    """File whose first line is the password, where none is given."""
    nats_replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """Copies of each key-value bucket; 3 with a NATS cluster of three, so that any one server may be lost."""
    instance_id: SubjectToken = Field(default_factory=default_instance_id)
    """Name of this process, unique in the cluster: 1 to 64 letters, digits, '_' or '-'."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe events that are logged."""
    log_format: Literal["auto", "human", "json"] = "auto"
    """How events are written: one readable line, one JSON object, or what suits stderr (a terminal gets lines)."""
    health_file: Path | None = None
    """File that is rewritten every second, for `python -m shared.process.health FILE` as a container's health check."""

    def nats_credentials(self) -> tuple[str, str] | None:
        """Return user and password for the NATS server, None if none are set apart from the URL's.

        Raises:
            ConfigError: there is a user without a password, or as `read_password`.
        """
        if not self.nats_user:
            return None
        password = self.nats_password
        if not password and self.nats_password_file is not None:
            password = read_password(self.nats_password_file, "Make it with `sluice nats-config`")
        if not password:
            raise ConfigError(f"user '{self.nats_user}' has no password", "Set SLUICE_NATS_PASSWORD or _PASSWORD_FILE")
        return self.nats_user, password

    def nats_login(self) -> tuple[str, str] | None:
        """Return user and password as `nats_credentials`, or those in the URL where none are set apart from it."""
        parts = urlsplit(self.nats_url.split(",")[0])
        login = self.nats_credentials()
        if login is not None or parts.username is None or parts.password is None:
            return login
        return unquote(parts.username), unquote(parts.password)


S = TypeVar("S", bound=Settings)


def load(
    model: type[S],
    section: str,
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    path: Path | None = None,
) -> S:
    """Return the settings. With `--help` among the flags it prints them and exits with 0.

    Args:
        model: the settings' type.
        section: `worker`, `dispatcher`, …; "" for `sluice up`.
        argv: flags without the program's name; None means this process's.
        env: variables; None means this process's.
        path: the TOML file, which must exist; None means `./sluice.toml` if there is one.

    Raises:
        ConfigError: the text is one line that says what is wrong, where, and what is allowed.
    """
    argv = sys.argv[1:] if argv is None else argv
    env = os.environ if env is None else env
    common = ServiceSettings.model_fields if issubclass(model, ServiceSettings) else ()
    schema = Schema(model, section, frozenset(common))
    if "--help" in argv or "-h" in argv:
        sys.stdout.write(_help(schema))
        raise SystemExit(0)
    given: dict[str, Given] = {}
    if path is not None or os.path.lexists(CONFIG_FILE):
        given |= read_toml(schema, path or CONFIG_FILE)
    given |= read_env(schema, env)
    given |= read_flags(schema, argv)
    check_texts(given)
    named = {name: item for name, item in given.items() if not (item.value == AUTO and _is_chosen(model, name))}
    try:
        return model.model_validate({name: item.value for name, item in named.items()})
    except ValidationError as error:
        raise _explain(error, schema, given) from None


def _is_chosen(model: type[Settings], name: str) -> bool:
    return field_type(model.model_fields[name]).is_chosen


def _help(schema: Schema) -> str:
    program = f"python -m services.{schema.section}" if schema.section else "sluice up"
    names = {name: ", ".join(schema.variables(name)) for name in schema.model.model_fields}
    return help_text(schema.model, program, names)


def _explain(error: ValidationError, schema: Schema, given: Mapping[str, Given]) -> ConfigError:
    """Turn pydantic's report into one sentence about the first bad value."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    own_words: Any = first.get("ctx", {}).get("error")
    if name not in schema.model.model_fields:  # a rule about several fields
        return ConfigError(str(own_words or first["msg"]))
    origin = given[name].origin if name in given else flag_name(name)
    if first["type"] == "missing":
        hint = f"Give {flag_name(name)}, set {schema.variable(name)}, or write {name} in {CONFIG_FILE}"
        return ConfigError(f"{flag_name(name)} is required", hint)
    if own_words is not None:
        return ConfigError(f"{origin}: {own_words}")
    field = schema.model.model_fields[name]
    value = f"'{str(first['input'])[:80]}'" if field.repr else "this value"
    return ConfigError(f"{origin}: {value} is not allowed", f"Use {allowed_text(field)}")
