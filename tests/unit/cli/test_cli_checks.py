"""What is refused before anything starts, and with which words."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from cli import model
from cli.cluster import checks
from cli.cluster.broker import Broker, BrokerAccess, named_broker
from cli.cluster.children import ClusterPlan, device_of
from cli.cluster.run_dir import RunDir
from cli.cluster.settings import UpSettings, load_up_settings, log_dir_of
from cli.cluster.supervisor import Supervisor
from cli.model import Model, find_model
from services.worker.config import WorkerSettings
from shared.errors import ConfigError, StartupError
from shared.process.config import load
from shared.transport.nats_config import new_passwords
from shared.transport.nats_roles import BrokerRole
from shared.transport.nats_server import EmbeddedNats
from tests.support.ports import free_port


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("SLUICE_") or name == "NATS_URL"]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def settings(**fields: object) -> UpSettings:
    return UpSettings.model_validate(fields)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_own_addresses_need_no_key(host: str) -> None:
    checks.check_settings(settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_addresses_are_refused_unless_accepted(host: str) -> None:
    with pytest.raises(
        StartupError,
        match=r"no key\. Give it keys with --api-keys-file, listen on 127\.0\.0\.1, or accept it with --allow-no-key",
    ):
        checks.check_settings(settings(host=host))
    checks.check_settings(settings(host=host, allow_no_key=True))
    checks.check_settings(settings(host=host, api_key="k" * 16))


def test_everybodys_pages_are_let_in_with_keys_only() -> None:
    with pytest.raises(StartupError, match=r"--allow-origin '\*' without keys .*--api-keys-file"):
        checks.check_settings(settings(allow_origin="https://chat.example,*"))
    checks.check_settings(settings(allow_origin="*", api_key="k" * 16))


def test_a_file_of_keys_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        StartupError, match=r"there is no file of keys .*nowhere\.toml\. Make one with `sluice keys create`"
    ):
        checks.check_settings(settings(api_keys_file=tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"system": "meld"},
            "sluice: unknown system 'meld'; did you mean 'mell'? (available: fcfs, fcfs-chunked, fcfs-pp, ",
        ),
        (
            {"system": "oracle"},
            "sluice: system 'oracle' has unlimited KV memory, so it runs in the simulator only; live there are: fcfs, ",
        ),
        ({"system": "fcsf"}, "sluice: unknown system 'fcsf'; did you mean 'fcfs'?"),
        (
            {"system": "fcfs-pp", "workers": 3},
            "sluice: system fcfs-pp joins 2 workers to a pipeline: 3 do not come out even. Give a multiple of 2 as --w",
        ),
        ({"device": "gpu"}, "sluice: unknown device 'gpu'. Use --device auto, cpu, cuda or cuda:<index>"),
        ({"device": "cuda:x"}, "sluice: unknown device 'cuda:x'"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(fields: dict[str, object], line: str) -> None:
    with pytest.raises(StartupError) as refusal:
        checks.check_settings(settings(**fields))
    assert str(refusal.value).startswith(line)


def test_workers_share_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB: what is given must be there, for all workers together."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**20}.__getitem__)
    for fits in ({"workers": 2, "memory": "2GiB"}, {"workers": 64}, {"device": "cuda", "memory": "80GiB"}):
        checks.check_settings(settings(**({"device": "cpu"} | fits)))
    with pytest.raises(StartupError, match=r"5\.0 GiB is more memory than the 4\.0 GiB of this machine\. Give at most"):
        checks.check_settings(settings(device="cpu", memory="5GiB"))
    with pytest.raises(StartupError, match=r"2\.0 GiB for each of 3 workers is more .* Give at most --memory 1365MiB"):
        checks.check_settings(settings(device="cpu", workers=3, memory="2GiB"))
    checks.check_settings(settings(device="cpu", workers=3, memory="1365MiB"))
    for fits in ({"memory": "3GiB", "host_memory": "1GiB"}, {"workers": 4, "host_memory": "1GiB"}):
        checks.check_settings(settings(device="cpu", **fits))
    with pytest.raises(StartupError, match=r"4\.1 GiB is .* Give at most --memory and --host-memory 4096MiB together"):
        checks.check_settings(settings(device="cpu", memory="4GiB", host_memory="100MiB"))
    with pytest.raises(StartupError, match=r"2\.0 GiB for each of 3 workers .* Give at most --host-memory 1365MiB, or"):
        checks.check_settings(settings(workers=3, host_memory="2GiB", device="cuda", memory="80GiB"))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(StartupError, match=f"port {port} on 127.0.0.1 is taken. Choose another with --port"):
            checks.find_port("127.0.0.1", port)
    assert checks.find_port("127.0.0.1", port) == port


def test_port_0_gives_a_free_port() -> None:
    port = checks.find_port("127.0.0.1", 0)
    assert checks.find_port("127.0.0.1", port) == port > 1023
    assert port < 32_768, "no outgoing connection takes it meanwhile"


def test_a_port_that_is_promised_to_somebody_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(checks, "QUIET_PORTS", [port])
    monkeypatch.setattr(checks, "_NUM_TRIES", 1)
    assert checks.find_port("127.0.0.1", 0) == port
    assert checks.find_port("127.0.0.1", 0, promised=[port]) != port


async def test_a_broker_chooses_its_port_when_it_starts_and_leaves_the_dispatcher_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port, chosen = free_port(), list[int]()

    def note(_folder: Path, chosen_port: int, *_: object) -> list[str]:
        chosen.append(chosen_port)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(checks, "QUIET_PORTS", [port])
    monkeypatch.setattr(checks, "_NUM_TRIES", 1)
    monkeypatch.setattr("cli.cluster.broker.server_command", note)
    broker = Broker(settings(), AsyncMock(Supervisor), tmp_path, lambda _: None)
    access = broker.check()
    for promised_port in (0, port):
        with pytest.raises(StartupError, match="Set TMPDIR"):
            await broker.start(access, promised_port)
    with socket.socket() as of_another:
        of_another.bind(("127.0.0.1", port))
        of_another.listen()
        with pytest.raises(StartupError, match="Set TMPDIR"):
            await broker.start(access, 0)
    assert [each == port for each in chosen] == [True, False, False]


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartupError, match="Use an address of this machine"):
        checks.find_port("192.0.2.1", 0)


def test_a_broker_that_does_not_answer_is_named() -> None:
    with pytest.raises(StartupError, match=r"no NATS server answers at 127\.0\.0\.1:1 .*unset NATS_URL"):
        checks.check_broker("nats://127.0.0.1:1")


@pytest.mark.parametrize(
    ("greeting", "line"),
    [
        (
            b'INFO {"server_id":"x","version":"2.12.0","headers":true} \r\n',
            r"runs without JetStream\. Start it with -js",
        ),
        (b"SSH-2.0-x\r\n", r"what listens at 127\.0\.0\.1:\d+ is no NATS server"),
        (b"", "is no NATS server"),
        (b'INFO {"server_id":"x","jetstream":true} \r\n', None),
        (b'INFO {"server_id":"x","cluster":"c1"} \r\n', None),
    ],
)
def test_a_broker_that_cannot_serve_is_refused_by_its_greeting(
    monkeypatch: pytest.MonkeyPatch, greeting: bytes, line: str | None
) -> None:
    monkeypatch.setattr(checks, "BROKER_LIMIT_S", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"nats://127.0.0.1:{server.getsockname()[1]}"
        connected: list[socket.socket] = []

        def greet() -> None:
            connection, _ = server.accept()
            connected.append(connection)
            connection.sendall(greeting[:7])
            connection.sendall(greeting[7:])
            if not greeting:
                connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(StartupError, match=line) if line else nullcontext():
            checks.check_broker(url)
        thread.join()
        connected[0].close()


def test_a_broker_of_our_own_kind_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "BROKER_LIMIT_S", 30.0)
    with EmbeddedNats() as broker:
        checks.check_broker(broker.start(tmp_path))


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_is_served_under_its_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "models" / "tiny")
    assert find_model(str(folder)) == Model(folder, "tiny")
    assert find_model("models/tiny") == Model(folder, "tiny")


def test_without_a_name_the_shipped_model_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(tmp_path / "model")
    monkeypatch.setattr(model, "shipped_folder", lambda: folder)
    assert find_model("") == Model(folder, "sluice-demo")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nowhere", "sluice: there is no folder nowhere. Give the folder that holds config.json, or an id owner/name"),
        ("./a/b/c", "sluice: there is no folder ./a/b/c."),
        ("empty", "sluice: the folder empty holds no model: config.json is missing in"),
        ("file", "sluice: file is not a folder. Give the folder that holds config.json"),
        ("m" * 5000, "sluice: there is no folder mmm"),
        ("~nobody-of-this-name/m", "sluice: there is no folder ~nobody-of-this-name/m"),
        ("\udcff", "sluice: the folder /"),
    ],
)
def test_a_wrong_folder_is_refused(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")  # noqa: PTH102  no text
    with pytest.raises(StartupError) as refusal:
        find_model(text)
    assert str(refusal.value).startswith(line)
    assert str(refusal.value).isprintable()
    assert (text == "\udcff") is ("cannot be used, it is not UTF-8" in str(refusal.value))


@pytest.mark.parametrize("name", ["file", "file/in-it", "/proc/logs", "n" * 300])
def test_a_folder_for_logs_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"no log can be written to .*\. Set --log-dir to a folder of yours"):
        log_dir_of(settings(log_dir=name), tmp_path)


def test_a_temporary_folder_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "\udcff"))
    with pytest.raises(StartupError, match=r"it is not UTF-8\. Set TMPDIR"), RunDir():
        pass


def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_commands_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sluice.toml").write_text('workers = 3\nmemory = "2GiB"\nport = 1\n')
    monkeypatch.setenv("SLUICE_MEMORY", "3GiB")
    monkeypatch.setenv("SLUICE_PORT", "2")
    loaded = load_up_settings({"port": "4", "deterministic": True, "host": None}, {"workers": 2, "device": "cuda"})
    assert (loaded.workers, loaded.memory, loaded.port, loaded.device) == (3, 3 * 2**30, 4, "cuda")
    assert loaded.deterministic
    assert loaded.has_own_broker


@pytest.mark.parametrize("name", ["memory", "host_memory"])
@pytest.mark.parametrize("value", ["many", "-1GiB", "12XB"])
def test_a_bad_size_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}"):
        load_up_settings({name: value})


@pytest.mark.parametrize(
    ("given", "passed"), [(None, None), ("0", "0"), ("1.5GiB", str(3 * 2**29)), ("8GB", str(8 * 10**9))]
)
def test_workers_are_told_how_many_share_the_host_and_what_each_takes_of_it(
    given: str | None, passed: str | None
) -> None:
    named = {"workers": "3", "host_memory": given, "device": "cpu", "dtype": "float32", "memory": "1GiB"}
    chosen = load_up_settings(named)
    plan = ClusterPlan(chosen, Model(Path("m"), "m"), BrokerAccess("nats://x"), 80, Path("run"))
    for name in plan.worker_names():
        argv = {spec.name: spec.argv for spec in plan.specs()}[name]
        assert flag(argv, "--host-workers") == "3"
        assert ("--host-memory" in argv) == (passed is not None)
        assert passed is None or flag(argv, "--host-memory") == passed
        worker = load(WorkerSettings, "worker", argv[4:], {})
        assert (worker.host_workers, worker.host_memory) == (3, None if passed is None else int(passed))


def test_a_misspelt_variable_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_WORKER", "2")
    with pytest.raises(ConfigError, match="SLUICE_WORKERS"):
        load_up_settings({})


@pytest.mark.parametrize("given", ["flag", "NATS_URL"])
def test_a_named_broker_is_used(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    if given == "NATS_URL":
        monkeypatch.setenv("NATS_URL", "nats://broker:4222")
    loaded = load_up_settings({"nats_url": "nats://broker:4222" if given == "flag" else None})
    assert not loaded.has_own_broker
    assert loaded.nats_url == "nats://broker:4222"


@pytest.mark.parametrize(("workers", "cores", "expected"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (16, 8, 1)])
def test_workers_share_the_cores(workers: int, cores: int, expected: int) -> None:
    assert settings(workers=workers).cores_per_worker(cores) == expected


def test_workers_take_the_devices_in_turn() -> None:
    assert [device_of("cuda", index, 2) for index in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert device_of("cuda", 1, 1) == "cuda"
    assert device_of("cuda:1", 0, 2) == "cuda:1"
    assert device_of("cpu", 1, 2) == "cpu"


def plan_of(broker: BrokerAccess | None = None, port: int = 80, **fields: object) -> ClusterPlan:
    return ClusterPlan(settings(**fields), Model(Path("m"), "m"), broker or BrokerAccess("nats://x"), port, Path("run"))


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_every_child_gets_its_flags() -> None:
    chosen: dict[str, Any] = {
        "memory": "2GiB",
        "dtype": "bfloat16",
        "deterministic": True,
        "threads": 3,
        "prefix_caching": False,
    }
    specs = {spec.name: spec.argv for spec in plan_of(port=8123, workers=2, **chosen).specs()}
    assert list(specs) == ["monitor", "planner", "worker-0", "worker-1", "dispatcher"]
    assert {flag(argv, "--nats-url") for argv in specs.values()} == {"nats://x"}
    for name, argv in specs.items():
        assert flag(argv, "-m") == f"services.{name.partition('-')[0]}"
    worker = specs["worker-1"]
    assert flag(worker, "--instance-id") == "worker-1"
    assert flag(worker, "--memory") == str(2 * 2**30)
    assert flag(worker, "--threads") == "3"
    assert flag(worker, "--served-model-name") == flag(specs["dispatcher"], "--served-model-name") == "m"
    assert "--deterministic" in worker
    assert "--no-prefix-caching" in worker
    assert flag(specs["dispatcher"], "--port") == "8123"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"graphs": False, "overlap": True}, ["--no-graphs", "--overlap"]),
        ({"fused": False}, ["--no-fused"]),
        ({"overlap": False}, ["--no-overlap"]),
    ],
)
def test_workers_are_told_of_graphs_fused_kernels_and_overlap_only_what_was_chosen(
    changes: dict[str, Any], expected: list[str]
) -> None:
    worker = next(spec.argv for spec in plan_of(**changes).specs() if spec.name == "worker-0")
    assert [each for each in worker if each.endswith(("graphs", "fused", "overlap"))] == expected


def test_the_dispatcher_gets_the_keys_and_no_key_stands_in_its_flags() -> None:
    key = "k" * 20
    plan = plan_of(host="0.0.0.0", api_key=key, api_keys_file="keys.toml", allow_no_key=True)
    specs = {spec.name: spec for spec in plan.specs()}
    dispatcher = specs["dispatcher"]
    assert flag(dispatcher.argv, "--api-keys-file") == str(Path("keys.toml").absolute())
    assert flag(dispatcher.argv, "--api-keys-kept") == str(Path("run") / "keys.toml")
    assert "--allow-no-key" in dispatcher.argv
    assert dispatcher.env["SLUICE_DISPATCHER_API_KEY"] == key
    assert not any(key in part for spec in specs.values() for part in spec.argv)
    assert not any(key in value for name, spec in specs.items() if name != "dispatcher" for value in spec.env.values())


def test_the_dispatcher_is_told_by_which_names_and_for_whose_pages_it_may_be_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICE_ALLOW_ORIGIN", "HTTPS://Chat.Example:443,http://[::1]:3000")
    plan = replace(plan_of(), settings=load_up_settings({"allow_host": "GPU1.lan,gpu2"}))
    argv = next(spec.argv for spec in plan.specs() if spec.name == "dispatcher")
    assert flag(argv, "--allow-host") == "gpu1.lan,gpu2"
    assert flag(argv, "--allow-origin") == "https://chat.example,http://[::1]:3000"
    argv = next(spec.argv for spec in plan_of().specs() if spec.name == "dispatcher")
    assert not {"--allow-host", "--allow-origin"} & set(argv)
    with pytest.raises(ConfigError, match=r"--allow-origin: 'chat\.example' is no origin \(allowed: scheme://host"):
        load_up_settings({"allow_origin": "chat.example"})


def test_of_several_names_a_worker_gets_the_first_and_the_dispatcher_all() -> None:
    plan = plan_of(
        served_model_name="mine,org/other",
        generation_config="none",
        max_model_len=128,
        reasoning_parser="qwen3",
        tool_parser="phi",
    )
    specs = {spec.name: spec.argv for spec in plan.specs()}
    assert plan.model_name == flag(specs["worker-0"], "--served-model-name") == "mine"
    assert flag(specs["worker-0"], "--max-model-len") == "128"
    assert flag(specs["dispatcher"], "--served-model-name") == "mine,org/other"
    assert flag(specs["dispatcher"], "--generation-config") == "none"
    assert flag(specs["dispatcher"], "--reasoning-parser") == "qwen3"
    assert flag(specs["dispatcher"], "--tool-parser") == "phi"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("[::]", "http://[::1]:80"),
        ("0", "http://127.0.0.1:80"),
        ("[::1]", "http://[::1]:80"),
        ("::ffff:127.0.0.1", "http://127.0.0.1:80"),
        ("fd00::7", "http://[fd00::7]:80"),
        ("localhost", "http://localhost:80"),
    ],
)
def test_the_url_can_be_opened_from_this_machine(host: str, url: str) -> None:
    assert plan_of(host=host).url == url


def test_children_of_an_own_broker_sign_in_as_their_role_and_no_flag_shows_a_password() -> None:
    access = BrokerAccess("nats://127.0.0.1:9", new_passwords())
    plan = plan_of(access)
    for spec in plan.specs():
        role = BrokerRole(spec.name.split("-")[0])
        assert spec.env[f"SLUICE_{role.upper()}_NATS_USER"] == role
        assert spec.env[f"SLUICE_{role.upper()}_NATS_PASSWORD"] == access.passwords[role]
        known = [password for password in access.passwords.values() if password in str(dict(spec.env))]
        assert known == [access.passwords[role]], "its own password and no other"
        assert not any(password in flag for flag in spec.argv for password in access.passwords.values())
    assert plan.nats_url == f"nats://operator:{access.passwords[BrokerRole.OPERATOR]}@127.0.0.1:9"


def test_a_password_in_the_url_of_a_named_broker_reaches_children_by_their_environment() -> None:
    access = named_broker(settings(nats_url="nats://me:p%40ss@h:4222,nats://me:p%40ss@i:4222"))
    assert access.url == "nats://h:4222,nats://i:4222"
    assert access.operator == ("me", "p@ss")
    assert access.operator_url == "nats://me:p%40ss@h:4222,nats://me:p%40ss@i:4222"
    assert access.env(BrokerRole.WORKER) == {"SLUICE_NATS_USER": "me", "SLUICE_NATS_PASSWORD": "p@ss"}
    assert not any("p%40ss" in flag or "p@ss" in flag for spec in plan_of(access).specs() for flag in spec.argv)


def test_a_user_that_was_set_is_left_to_the_children_to_find(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\nmore")
    access = named_broker(settings(nats_url="nats://h:4222", nats_user="ops", nats_password_file=tmp_path / "password"))
    assert access.operator == ("ops", "secret")
    assert access.env(BrokerRole.WORKER) == {}
    with pytest.raises(ConfigError, match="no password"):
        named_broker(settings(nats_url="nats://h:4222", nats_user="ops"))
    with pytest.raises(ConfigError, match="cannot be read"):
        named_broker(settings(nats_url="nats://h:4222", nats_user="ops", nats_password_file=tmp_path / "missing"))
