"""Where settings come from: flags, environment variables, the TOML file. Each gives raw values and their origin."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from shared.errors import ConfigError
from shared.process.config_fields import FieldType, allowed_text, did_you_mean, field_type, flag_name, nearest
from shared.reading import InputFile, check_text, parse_toml

SECTIONS: Final = ("dispatcher", "monitor", "planner", "worker")
"""Tables that `sluice.toml` may have; each is read by the service of that name."""
EXTRA_VARIABLES: Final = {
    "nats_url": "NATS_URL",
    "api_key": "SLUICE_API_KEY",
    "api_keys_file": "SLUICE_API_KEYS_FILE",
}
"""Variables that are honoured for a field of any section, after the section's own."""
MAX_TOML_BYTES: Final = 2**20
"""Largest `sluice.toml`."""
_PREFIX: Final = "SLUICE_"
_TABLE_LINE = re.compile(r"\s*\[\s*([A-Za-z0-9_-]+)\s*\]")


@dataclass(frozen=True, slots=True)
class Given:
    """One raw value and where it stands."""

    value: Any
    origin: str
    """For messages: `--port`, `SLUICE_PORT`, `port in sluice.toml, line 3`."""


@dataclass(frozen=True, slots=True)
class Schema:
    """What the sources need to know of a settings model.

    Args:
        model: the settings.
        section: table of the file, part of the variables' names; "" = the top.
        common: fields that are also read from the top.
    """

    model: type[BaseModel]
    section: str
    common: frozenset[str]

    @property
    def prefix(self) -> str:
        """How the section's own variables begin."""
        return f"{_PREFIX}{self.section.upper()}_" if self.section else _PREFIX

    def variable(self, field_name: str) -> str:
        """Return the field's own variable."""
        return self.prefix + field_name.upper()

    def variables(self, field_name: str) -> list[str]:
        """Return the field's variables, the strongest first."""
        names = [self.variable(field_name)]
        if field_name in self.common:
            names += [_PREFIX + field_name.upper()] if self.section else []
        names += [EXTRA_VARIABLES[field_name]] if field_name in EXTRA_VARIABLES else []
        return list(dict.fromkeys(names))


def read_flags(schema: Schema, argv: Sequence[str]) -> dict[str, Given]:
    """Return the fields that flags give: `--name VALUE`, `--name=VALUE`, `--switch`, `--no-switch`. The last one wins.

    Fields of several values take commas, and collect repeated flags.

    Raises:
        ConfigError: an unknown flag, a missing value, or a bare argument.
    """
    kinds = {name: field_type(field) for name, field in schema.model.model_fields.items()}
    by_flag = {flag_name(name): name for name in kinds}
    given: dict[str, Given] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, has_value, text = argument.partition("=")
        if flag not in by_flag:
            name = _negated_switch(argument, by_flag, kinds)
            given[name] = Given(value=False, origin=argument)
            continue
        name = by_flag[flag]
        if kinds[name].is_bool and not has_value:
            given[name] = Given(value=True, origin=flag)
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{flag} needs a value", f"Use {allowed_text(schema.model.model_fields[name])}")
            text = rest.pop(0)
        given[name] = Given(_collect(kinds[name], text, given.get(name)), flag)
    return given


def _negated_switch(argument: str, by_flag: dict[str, str], kinds: dict[str, FieldType]) -> str:
    name = by_flag.get("--" + argument.removeprefix("--no-"), "") if argument.startswith("--no-") else ""
    if name and kinds[name].is_bool:
        return name
    if not argument.startswith("-"):
        raise ConfigError(f"unexpected argument '{argument[:80]}'", "Settings are given as --name VALUE")
    flag = argument.partition("=")[0]
    negative = [f"--no-{known[2:]}" for known, field in by_flag.items() if kinds[field].is_bool]
    hint = did_you_mean(flag, [*by_flag, *negative], "There are no flags here")
    raise ConfigError(f"unknown flag {flag[:80]}", hint)


def _collect(kind: FieldType, text: str, before: Given | None) -> Any:
    if not kind.is_sequence:
        return text
    return [*(before.value if before else []), *split_values(text)]


def check_texts(given: Mapping[str, Given]) -> None:
    """Check that every text, also a path, can be passed on and logged.

    Raises:
        ConfigError: one is not UTF-8.
    """
    for item in given.values():
        for text in item.value if isinstance(item.value, list) else [item.value]:
            try:
                check_text(text if isinstance(text, str) else "")
            except ValueError as error:
                raise ConfigError(f"{item.origin}: '{text[:80]}' cannot be used, {error}") from None


def split_values(text: str) -> list[str]:
    """Return the values of a field of several, written with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_env(schema: Schema, env: Mapping[str, str]) -> dict[str, Given]:
    """Return the fields that variables give; an empty variable counts as not given.

    Raises:
        ConfigError: a variable of this section names no field.
    """
    _refuse_unknown_variables(schema, env)
    given: dict[str, Given] = {}
    for name, field in schema.model.model_fields.items():
        for variable in schema.variables(name):
            if env.get(variable):
                text = env[variable]
                given[name] = Given(split_values(text) if field_type(field).is_sequence else text, variable)
                break
    return given


def _refuse_unknown_variables(schema: Schema, env: Mapping[str, str]) -> None:
    own = {schema.variable(name) for name in schema.model.model_fields}
    common = {_PREFIX + name.upper() for name in schema.common}
    others = tuple(f"{_PREFIX}{section.upper()}_" for section in SECTIONS if section != schema.section)
    for variable in sorted(env):
        if not variable.startswith(_PREFIX) or variable in own or variable in common:
            continue
        if variable.startswith(others):
            continue
        if variable.startswith(schema.prefix):
            raise ConfigError(f"unknown environment variable {variable[:80]}", did_you_mean(variable, own, "Unset it"))
        _refuse_near_miss(variable, _PREFIX, schema.common, f"unknown environment variable {variable[:80]}")


def _refuse_near_miss(name: str, prefix: str, common: Iterable[str], message: str) -> None:
    """Refuse a name at the top that is not ours but looks like one of ours.

    The top belongs to `sluice up`, whose names a service does not know; a name that is almost one that every service
    reads is a slip all the same.
    """
    close = nearest(name.removeprefix(prefix).lower(), common, cutoff=0.85)
    if close is not None:
        known = prefix + close.upper() if prefix else close
        raise ConfigError(message, f"Did you mean {known}?")


def read_toml(schema: Schema, path: Path) -> dict[str, Given]:
    """Return the fields that the file gives: those of the section's table, and common ones from the top.

    Raises:
        ConfigError: it cannot be read, is no TOML, or has an unknown key or table.
    """
    file = InputFile(path, MAX_TOML_BYTES, hint="Correct it, or leave it out", kind=ConfigError)
    text = file.read_text()
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise file.error(f"is {error}") from None
    place = _Place(path, text)
    sections = {*SECTIONS, schema.section} - {""}
    top: dict[str, Any] = {}
    for key, value in document.items():
        if key in sections:
            if not isinstance(value, dict):
                raise ConfigError(f"{place.of('', key)} is not a table", f"Write [{key}]")
        elif isinstance(value, dict):
            hint = did_you_mean(f"[{key}]", [f"[{name}]" for name in sections], "Remove it")
            raise ConfigError(f"unknown table {place.of('', key)}", hint)
        else:
            top[key] = value
    given = _top_values(schema, top, place)
    if schema.section:
        given |= _table_values(schema, document.get(schema.section, {}), place)
    return given


def _top_values(schema: Schema, top: dict[str, Any], place: _Place) -> dict[str, Given]:
    fields = schema.common if schema.section else frozenset(schema.model.model_fields)
    for key in top:
        if key in fields:
            continue
        message = f"unknown key {place.of('', key)}"
        if not schema.section:
            raise ConfigError(message, did_you_mean(key, fields, "Remove it"))
        _refuse_near_miss(key, "", fields, message)
    return {key: Given(value, place.of("", key)) for key, value in top.items() if key in fields}


def _table_values(schema: Schema, table: dict[str, Any], place: _Place) -> dict[str, Given]:
    fields = schema.model.model_fields
    for key in table:
        if key not in fields:
            raise ConfigError(f"unknown key {place.of(schema.section, key)}", did_you_mean(key, fields, "Remove it"))
    return {key: Given(value, place.of(schema.section, key)) for key, value in table.items()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Finds the line of a key, for messages."""

    path: Path
    text: str

    def of(self, table: str, key: str) -> str:
        name = f"{table}.{key}"[:80] if table else key[:80]
        line = self._line(table, key)
        return f"{name} in {self.path}, line {line}" if line else f"{name} in {self.path}"

    def _line(self, table: str, key: str) -> int | None:
        in_table = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]")
        dotted = re.compile(rf"\s*{re.escape(table)}\s*(\.\s*{re.escape(key)}\s*=|=)")
        current = ""
        for number, line in enumerate(self.text.splitlines(), start=1):
            header = _TABLE_LINE.match(line)
            if header:
                current = header.group(1)
                if not table and current == key:
                    return number
            elif (current == table and in_table.match(line)) or (table and not current and dotted.match(line)):
                return number
        return None
