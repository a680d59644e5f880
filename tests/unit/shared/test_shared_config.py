from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from shared.errors import StartupError
from shared.process.config import (
    ConfigError,
    ModelNames,
    ServiceSettings,
    Settings,
    Size,
    load,
    parse_size,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class WorkerLike(ServiceSettings):
    """Settings with a field of each type."""

    port: Annotated[int, Field(ge=1, le=65_535)] = 8000
    """Port to listen on."""
    memory: Size = 2**29
    """Budget per worker."""
    reserve: Size | None = None
    """Memory kept free."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    colour: Colour = Colour.RED
    """A choice from an enumeration."""
    deterministic: bool = False
    """Identical tokens whatever the batch."""
    stop_ids: tuple[int, ...] = ()
    """Several numbers."""
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A share."""
    model: Path | None = None
    """Folder of the model."""


class Needy(Settings):
    model: str
    """Folder of the model."""
    low: int = 1
    """Lower limit."""
    high: int = 2
    """Upper limit."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low ({self.low}) is above high ({self.high})")
        return self


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load_worker(
    argv: Sequence[str] = (), env: Mapping[str, str] | None = None, toml: str | None = None, section: str = "worker"
) -> WorkerLike:
    Path("sluice.toml").write_text(toml or "")
    return load(WorkerLike, section, argv, env or {})


def test_without_a_file_nothing_is_read() -> None:
    assert not Path("sluice.toml").exists()
    assert load(WorkerLike, "worker", [], {}).port == 8000


def refusal(
    argv: Sequence[str] = (), env: Mapping[str, str] | None = None, toml: str | None = None, section: str = "worker"
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_worker(argv, env, toml, section)
    text = str(caught.value)
    assert text.startswith("sluice: ")
    assert "\n" not in text
    return text.removeprefix("sluice: ")


# --- precedence -----------------------------------------------------------------------------------------------------


def test_without_any_source_the_defaults_hold() -> None:
    found = load_worker()
    assert found == WorkerLike(instance_id=found.instance_id)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", found.instance_id)
    assert found.instance_id.endswith(f"-{os.getpid()}")


SOURCES: list[tuple[str, list[str], dict[str, str], str]] = [
    ("default", [], {}, ""),
    ("cluster in sluice.toml, line 1", [], {}, 'cluster = "top"\n'),
    ("worker.cluster in sluice.toml, line 4", [], {}, '\n# a comment\n[worker]\ncluster = "table"\n'),
    ("SLUICE_CLUSTER", [], {"SLUICE_CLUSTER": "common"}, ""),
    ("SLUICE_WORKER_CLUSTER", [], {"SLUICE_WORKER_CLUSTER": "own"}, ""),
    ("--cluster", ["--cluster", "flag"], {}, ""),
]
VALUES = ["default", "top", "table", "common", "own", "flag"]


@given(st.sets(st.integers(1, 5)))
def test_the_strongest_source_wins_whatever_else_is_given(given_sources: set[int]) -> None:
    argv: list[str] = []
    env: dict[str, str] = {}
    for index in given_sources:
        argv += SOURCES[index][1]
        env |= SOURCES[index][2]
    toml = "".join(SOURCES[index][3] for index in sorted(given_sources))
    Path("sluice.toml").write_text(toml)
    assert load(WorkerLike, "worker", argv, env).cluster == VALUES[max(given_sources, default=0)]


def test_the_broker_is_also_read_from_the_common_variable_but_our_own_wins() -> None:
    assert load_worker(env={"NATS_URL": "nats://a:1"}).nats_url == "nats://a:1"
    assert load_worker(env={"NATS_URL": "nats://a:1", "SLUICE_NATS_URL": "nats://b:1"}).nats_url == "nats://b:1"
    assert load_worker(env={"NATS_URL": "nats://a:1"}, toml='nats_url = "nats://c:1"').nats_url == "nats://a:1"


def test_an_empty_variable_counts_as_not_given() -> None:
    assert load_worker(env={"NATS_URL": "", "SLUICE_WORKER_PORT": ""}).port == 8000


def test_fields_of_a_section_are_not_read_from_the_top() -> None:
    assert load_worker(env={"SLUICE_PORT": "9"}, toml="port = 7").port == 8000


def test_the_section_without_a_name_reads_the_top() -> None:
    assert load_worker(env={"SLUICE_PORT": "9"}, section="").port == 9
    assert load_worker(toml="port = 7\n[worker]\nport = 8\n", section="").port == 7


def test_the_file_may_be_named_and_must_then_exist(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("[worker]\nport = 5\n")
    assert load(WorkerLike, "worker", [], {}, path=tmp_path / "other.toml").port == 5
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load(WorkerLike, "worker", [], {}, path=tmp_path / "missing.toml")


# --- values ---------------------------------------------------------------------------------------------------------


def test_flags_take_each_type() -> None:
    argv = "--port=9 --memory 1.5GiB --reserve 64MiB --dtype bfloat16 --colour blue --deterministic --stop-ids 1,2"
    found = load_worker([*argv.split(), "--stop-ids", "3", "--ratio", ".25", "--model", "a dir", "--log-level=debug"])
    assert found.model_dump(exclude=set(ServiceSettings.model_fields) - {"log_level"}) == {
        "port": 9,
        "memory": 3 * 2**29,
        "reserve": 2**26,
        "dtype": "bfloat16",
        "colour": Colour.BLUE,
        "deterministic": True,
        "stop_ids": (1, 2, 3),
        "ratio": 0.25,
        "model": Path("a dir"),
        "log_level": "debug",
    }


def test_variables_take_each_type() -> None:
    env = {
        "PORT": "9",
        "MEMORY": "2GiB",
        "DTYPE": "bfloat16",
        "DETERMINISTIC": "true",
        "STOP_IDS": "4, 5",
        "RATIO": "0.1",
    }
    found = load_worker(env={f"SLUICE_WORKER_{name}": value for name, value in env.items()})
    assert (found.port, found.memory, found.dtype, found.deterministic) == (9, 2**31, "bfloat16", True)
    assert (found.stop_ids, found.ratio) == ((4, 5), 0.1)


def test_the_file_takes_each_type_in_its_own_notation() -> None:
    toml = '[worker]\nport = 9\nmemory = "2GiB"\nreserve = 1024\ndeterministic = true\nstop_ids = [4, 5]\nratio = 0.1\n'
    found = load_worker(toml=toml)
    assert (found.port, found.memory, found.reserve, found.deterministic) == (9, 2**31, 1024, True)
    assert (found.stop_ids, found.ratio) == ((4, 5), 0.1)


def test_the_last_flag_wins_and_a_switch_can_be_turned_off() -> None:
    assert load_worker(["--port", "1", "--port", "2"]).port == 2
    assert load_worker(["--no-deterministic"], env={"SLUICE_WORKER_DETERMINISTIC": "1"}).deterministic is False
    assert load_worker(["--deterministic=false"]).deterministic is False


SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@given(st.integers(0, 2**50), st.sampled_from(sorted(SIZE_UNITS)), st.sampled_from([str, str.lower, str.upper]))
def test_sizes_with_a_unit_are_exact(number: int, unit: str, spell: Callable[[str], str]) -> None:
    scale = SIZE_UNITS[unit]
    assert parse_size(f"{number}{spell(unit)}") == number * scale
    assert parse_size(f" {number}.5 {spell(unit)} ") == number * scale + scale // 2
    assert parse_size(number) == number


@pytest.mark.parametrize("spelling", ["8GB", "8 gb", "8000000000"])
def test_a_size_is_the_same_wherever_it_is_written(spelling: str) -> None:
    assert load_worker(["--memory", spelling]).memory == 8 * 10**9
    assert load_worker(env={"SLUICE_WORKER_MEMORY": spelling}).memory == 8 * 10**9
    assert load_worker(toml=f'[worker]\nmemory = "{spelling}"\n').memory == 8 * 10**9


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "iB", "1ib", "1GiBB", "1 G B", "-1", "1e3", "1.5.2MiB", "٣MiB", "1PB", "1" * 30, True, None, 1.5],
)
def test_other_sizes_are_refused_with_what_is_allowed(text: object) -> None:
    with pytest.raises(ValueError, match=r"KiB, MiB, GiB"):
        parse_size(text)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        setattr(load_worker(), "port", 1)  # noqa: B010 - mypy knows that the plain form fails


# --- refusals -------------------------------------------------------------------------------------------------------

BAD_VALUES = [
    ("port", "abc", "Use a whole number from 1 to 65535"),
    ("port", "0", "Use a whole number from 1 to 65535"),
    ("port", "1.5", "Use a whole number from 1 to 65535"),
    ("ratio", "1", "Use a finite number above 0 and below 1"),
    ("ratio", "nan", "Use a finite number above 0 and below 1"),
    ("dtype", "float8", "Use float32 or bfloat16"),
    ("colour", "green", "Use red or blue"),
    ("log-level", "loud", "Use debug, info, warning or error"),
    ("stop-ids", "1,x", "Use values separated by commas"),
]


@pytest.mark.parametrize(("name", "value", "hint"), BAD_VALUES)
def test_a_bad_value_is_refused_with_its_place_and_what_is_allowed(name: str, value: str, hint: str) -> None:
    field, variable = name.replace("-", "_"), f"SLUICE_WORKER_{name.replace('-', '_').upper()}"
    shown = value.split(",")[-1]
    assert refusal(["--" + name, value]) == f"--{name}: '{shown}' is not allowed. {hint}"
    assert refusal(env={variable: value}) == f"{variable}: '{shown}' is not allowed. {hint}"
    toml = f'\n[worker]\n{field} = "{value}"\n' if name != "stop-ids" else f'\n[worker]\n{field} = [1, "x"]\n'
    place = f"worker.{field} in sluice.toml, line 3"
    assert refusal(toml=toml) == f"{place}: '{shown}' is not allowed. {hint}"


def test_a_bad_switch_says_true_or_false() -> None:
    assert refusal(env={"SLUICE_WORKER_DETERMINISTIC": "maybe"}).endswith("'maybe' is not allowed. Use true or false")


def test_validators_speak_for_themselves() -> None:
    assert refusal(["--memory", "1GiBB"]).startswith("--memory: '1GiBB' is not a size")
    assert refusal(["--cluster", "a.b"]).startswith("--cluster: 'a.b' cannot be part of a subject")


@pytest.mark.parametrize(
    "url",
    [
        "localhost",
        "http://a:1",
        "nats://",
        "nats://[::1",
        "nats://u:secret[@a:1",
        "nats://a:x",
        "nats://a:99999",
        "nats://a:0",
        "nats://a b",
        "nats://a:1,nats://[",
        "nats://a:1,",
    ],
)
def test_a_bad_broker_url_is_refused_and_what_may_be_a_password_is_not_shown(url: str) -> None:
    text = refusal(["--nats-url", url])
    assert text == "--nats-url: no URL of a NATS server (allowed: nats, tls, ws, wss, as nats://host:4222)"


@pytest.mark.parametrize("url", ["nats://a", "tls://u:p@[::1]:4222", "ws://a:1,wss://b:2"])
def test_urls_of_brokers_are_taken_as_they_are(url: str) -> None:
    assert load_worker(["--nats-url", url]).nats_url == url


def test_a_rule_about_several_fields_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^sluice: low \(5\) is above high \(2\)$"):
        load(Needy, "worker", ["--model", "m", "--low", "5"], {})


def test_a_missing_value_says_how_to_give_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Needy, "worker", [], {})
    assert str(caught.value) == (
        "sluice: --model is required. Give --model, set SLUICE_WORKER_MODEL, or write model in sluice.toml"
    )


def test_unknown_flags_are_refused_with_the_nearest() -> None:
    assert refusal(["--prot", "1"]) == "unknown flag --prot. Did you mean --port?"
    assert refusal(["--no-determinstic"]) == "unknown flag --no-determinstic. Did you mean --no-deterministic?"
    assert refusal(["--no-port"]).startswith("unknown flag --no-port.")
    assert refusal(["--por", "1"]).startswith("unknown flag --por."), "no abbreviations"
    assert refusal(["-p", "1"]).startswith("unknown flag -p.")
    assert refusal(["serve"]) == "unexpected argument 'serve'. Settings are given as --name VALUE"


def test_a_flag_without_its_value_is_refused() -> None:
    hint = "Use a whole number from 1 to 65535"
    assert refusal(["--port"]) == f"--port needs a value. {hint}"
    assert refusal(["--port", "--deterministic"]) == f"--port needs a value. {hint}"
    assert load_worker(["--stop-ids", "-1"]).stop_ids == (-1,)


def test_unknown_variables_of_the_section_are_refused_with_the_nearest() -> None:
    expected = "unknown environment variable SLUICE_WORKER_PROT. Did you mean SLUICE_WORKER_PORT?"
    assert refusal(env={"SLUICE_WORKER_PROT": "1"}) == expected
    assert refusal(env={"SLUICE_PROT": "1"}, section="").endswith("Did you mean SLUICE_PORT?")


def test_variables_of_other_sections_and_programs_are_left_alone() -> None:
    env = {"SLUICE_DISPATCHER_ANYTHING": "1", "PATH": "x", "SLUICE_WORKERS": "2", "NATS_CREDS": "y"}
    load_worker(env=env)
    load_worker(env={"SLUICE_WORKER_ANYTHING": "1"}, section="")


def test_unknown_keys_and_tables_are_refused_with_line_and_nearest() -> None:
    found = refusal(toml="cluster = 'a'\n\n[worker]\nport = 1\nprot = 2\n")
    assert found == "unknown key worker.prot in sluice.toml, line 5. Did you mean port?"
    assert (
        refusal(toml="\n[wroker]\nport = 1\n") == "unknown table wroker in sluice.toml, line 2. Did you mean [worker]?"
    )
    assert refusal(toml="prot = 1\n", section="") == "unknown key prot in sluice.toml, line 1. Did you mean port?"
    assert refusal(toml="worker = 3\n") == "worker in sluice.toml, line 1 is not a table. Write [worker]"


def test_a_service_refuses_only_slips_at_the_top_since_the_rest_is_not_its_own() -> None:
    assert refusal(toml="nats_ulr = 'x'\n") == "unknown key nats_ulr in sluice.toml, line 1. Did you mean nats_url?"
    assert refusal(env={"SLUICE_NATS_ULR": "x"}).endswith("Did you mean SLUICE_NATS_URL?")
    load_worker(toml="workers = 2\nmodel = 'x'\n[dispatcher]\nanything = 1\n")


def test_a_dotted_key_is_found_too() -> None:
    assert refusal(toml="# x\nworker.port = 0\n").startswith("worker.port in sluice.toml, line 2:")
    assert refusal(toml="worker = { port = 0 }\n").startswith("worker.port in sluice.toml, line 1:")


@pytest.mark.parametrize("content", [b"port = \n", b"[worker\n", b"\xff\xfe", b"a = 1\na = 2\n"])
def test_a_file_that_is_no_toml_is_refused_by_name(content: bytes) -> None:
    Path("sluice.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^sluice: sluice\.toml is not (valid TOML|UTF-8 text)"):
        load(WorkerLike, "worker", [], {})


@given(
    st.lists(
        st.sampled_from(["--port", "--deterministic", "--no-deterministic", "7", "x", "-", "--", "--stop-ids", "="])
        | st.text(max_size=6),
        max_size=5,
    ),
    st.dictionaries(
        st.sampled_from(["SLUICE_WORKER_PORT", "SLUICE_X", "SLUICE_WORKER_X", "NATS_URL"]), st.text(max_size=5)
    ),
)
def test_whatever_is_given_loads_or_is_refused_in_one_line(argv: list[str], env: dict[str, str]) -> None:
    refusals = []
    try:
        load(WorkerLike, "worker", [item for item in argv if item != "-h"], env)
    except ConfigError as error:
        refusals.append(str(error))
    assert all(len(text.splitlines()) == 1 and text.isprintable() for text in refusals)


# --- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_prints_each_field_and_exits_with_0(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_worker([flag, "--unknown"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "python -m services.worker" in text
    for name, field in WorkerLike.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert f"SLUICE_WORKER_{name.upper()}" in text
        assert field.description
        assert field.description in text
    for part in ("float32|bfloat16", "default: 8000", "--no-deterministic", "SLUICE_CLUSTER", "NATS_URL", "SIZE"):
        assert part in text


def test_required_fields_are_marked_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Needy, "", ["--help"], {})
    assert "(required; SLUICE_MODEL)" in capsys.readouterr().out


# --- edges ----------------------------------------------------------------------------------------------------------


def test_by_default_flags_and_variables_are_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["a program", "--cluster", "c1"])
    monkeypatch.setattr(os, "environ", {"NATS_URL": "nats://x:1"})
    found = load(ServiceSettings, "worker")
    assert (found.cluster, found.nats_url) == ("c1", "nats://x:1")


def test_only_the_configuration_reads_the_environment() -> None:
    root = Path(__file__).parents[3]
    pattern = re.compile(r"os\.(environ|getenv)|from os import .*(environ|getenv)")
    guilty = [
        str(path.relative_to(root))
        for folder in ("shared", "services", "sim")
        for path in sorted((root / folder).rglob("*.py"))
        if pattern.search(path.read_text()) and path.name != "config.py"
    ]
    assert guilty == []


def test_startup_errors_are_one_line_with_the_next_step() -> None:
    assert str(StartupError("port 80 is\ntaken.", "Choose another with --port.")) == (
        "sluice: port 80 is taken. Choose another with --port"
    )
    assert str(StartupError("no such model")) == "sluice: no such model"


class Named(Settings):
    names: ModelNames = ()


@pytest.mark.parametrize(
    ("argv", "env", "names"),
    [
        ([], {}, ()),
        (["--names", "a, org/b,a"], {}, ("a", "org/b")),
        (["--names", "a", "--names", "b"], {}, ("a", "b")),
        ([], {"SLUICE_NAMES": "a,b c"}, ("a", "b c")),
    ],
)
def test_a_model_may_have_several_names(argv: list[str], env: dict[str, str], names: tuple[str, ...]) -> None:
    assert load(Named, "", argv, env).names == names
    assert Named.model_validate({"names": ",".join(names)}).names == names


@pytest.mark.parametrize("name", ["x" * 257, "a\x00b", "a\nb"])
def test_a_model_may_not_have_any_name(name: str) -> None:
    with pytest.raises(ConfigError, match="is no name for a model"):
        load(Named, "", [f"--names={name}"], {})


@pytest.mark.parametrize(("argv", "env"), [(["--names", ","], {}), (["--names="], {}), ([], {"SLUICE_NAMES": " ,, "})])
def test_names_that_name_nothing_are_not_taken_for_the_default(argv: list[str], env: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"NAMES|--names") as refusal:
        load(Named, "", argv, env)
    assert "no name is given (write at least one, or leave the setting out)" in str(refusal.value)
