"""Static checks of the compose file and the Dockerfile: what can be known without a container engine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest
import yaml

from services.dispatcher import __main__ as dispatcher
from services.dispatcher.config import DispatcherSettings
from services.planner.config import PlannerSettings
from services.worker.config import WorkerSettings
from shared.errors import StartupError
from shared.process.config import ServiceSettings, load
from shared.transport.nats_roles import BrokerRole
from tests.support.engine_api import compose_program

S = TypeVar("S", bound=ServiceSettings)
VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")
"""Name and default."""

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LASTING = sorted(set(SERVICES) - {"setup", "operator"})
"""Services that run as long as the cluster does; the other two do their work and end."""
SLUICE = sorted(name for name in SERVICES if name not in ("nats", "setup", "operator"))
GPU: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
PAGE = (ROOT / "docs" / "operations.md").read_text()
IMAGES = {"nats": "broker", "worker": "worker"}
"""Which image a service runs, if not that of the services without a model."""

KNOWN_KEYS = {
    "top": {"services", "networks", "volumes"},
    "service": {
        *("build", "cap_drop", "command", "depends_on", "entrypoint", "environment", "healthcheck", "image", "logging"),
        *("mem_limit", "network_mode", "networks", "pids_limit", "ports", "profiles", "read_only", "restart", "scale"),
        *("security_opt", "stop_grace_period", "tmpfs", "user", "volumes"),
    },
    "build": {"context", "dockerfile", "network", "args", "target"},
    "healthcheck": {"test", "interval", "timeout", "retries", "start_period"},
}
"""What this file uses of the compose schema as of docker-compose 1.29; newer keys are refused there."""


def test_only_known_keys_are_used() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} <= KNOWN_KEYS["top"]
    for name, service in SERVICES.items():
        assert set(service) <= KNOWN_KEYS["service"], name
        assert set(service.get("build", {})) <= KNOWN_KEYS["build"], name
        assert set(service.get("healthcheck", {})) <= KNOWN_KEYS["healthcheck"], name


def test_every_name_that_is_used_is_defined() -> None:
    volumes = {volume for service in SERVICES.values() for volume in filled(service["volumes"])}
    assert {name.split(":")[0] for name in volumes if not name.startswith(".")} == set(COMPOSE["volumes"])
    networks = {name for service in SERVICES.values() for name in service.get("networks", [])}
    assert networks == set(COMPOSE["networks"])
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)


def filled(value: Any, **variables: str) -> Any:
    """Return a part of the file with its variables' values, or their defaults."""
    if isinstance(value, dict):
        return {key: filled(part, **variables) for key, part in value.items()}
    if isinstance(value, list):
        return [filled(part, **variables) for part in value]
    return VARIABLE.sub(lambda found: variables.get(found[1]) or found[2], value) if isinstance(value, str) else value


def test_only_the_api_is_published_and_only_to_this_host_unless_somebody_says_where() -> None:
    published = {name: filled(service["ports"]) for name, service in SERVICES.items() if "ports" in service}
    assert published == {"dispatcher": ["127.0.0.1:8000:8000"]}
    ports = filled(SERVICES["dispatcher"]["ports"], SLUICE_ADDRESS="10.0.0.7", SLUICE_PORT="80")
    assert ports == ["10.0.0.7:80:8000"]
    assert COMPOSE["networks"]["inner"] == {"internal": True}
    outside = {name for name, service in SERVICES.items() if service.get("networks") != ["inner"]}
    assert outside == {"dispatcher", "setup"}
    assert SERVICES["setup"]["network_mode"] == "none"


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_containers_have_few_rights_and_bounded_means(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "65534:65534"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["pids_limit"] <= 512
    assert re.fullmatch(r"\d+[mg]", filled(service["mem_limit"]))
    assert "max-size" in service["logging"]["options"]


def test_every_image_has_a_name_and_is_built_by_one_service() -> None:
    for name, service in SERVICES.items():
        named = filled(service["image"], SLUICE_IMAGES="10.0.0.7:5000/team/", SLUICE_TAG="1.2")
        assert named == f"10.0.0.7:5000/team/sluice-{IMAGES.get(name, 'service')}:1.2"
        assert "/" not in filled(service["image"]), "a name of ours alone, which nobody else may give an image"
    built = {name: service["build"] for name, service in SERVICES.items() if "build" in service}
    assert {name: build["target"] for name, build in built.items()} == {"setup": "service", **IMAGES}
    assert all((build["context"], build["network"]) == (".", "host") for build in built.values())


@pytest.mark.parametrize("name", LASTING)
def test_every_lasting_service_has_a_health_check_and_is_started_again(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"
    assert SERVICES["setup"]["restart"] == "no"


@pytest.mark.parametrize("name", SLUICE)
def test_each_service_is_started_with_settings_that_it_knows_and_its_own_password_only(name: str) -> None:
    service, role = SERVICES[name], BrokerRole("setup" if name == "buckets" else name.split("-")[0])
    if role is BrokerRole.SETUP:
        assert service["command"] == ["cli.main", "nats-setup", "--keep"]
    else:
        assert service["command"][0] == f"services.{role}"
        assert (ROOT / "services" / role / "__main__.py").is_file()
    environment = service["environment"]
    assert environment["SLUICE_NATS_USER"] == role
    assert environment["SLUICE_NATS_PASSWORD_FILE"] == f"/keys/{role}/password"
    keys = [volume for volume in service["volumes"] if "/keys/" in volume]
    assert keys == [f"{role}-key:/keys/{role}:ro"]
    common = {f"SLUICE_{field.upper()}" for field in ServiceSettings.model_fields} | {"NATS_URL"}
    for variable in environment:
        assert variable in common or variable.startswith(f"SLUICE_{role.upper()}_"), variable


def settings_of(name: str, model: type[S], **variables: str) -> S:
    """Return the settings with which a container starts."""
    service = SERVICES[name]
    return load(model, name, service["command"][1:], filled(service["environment"], **variables))


def test_the_dispatcher_may_be_asked_by_its_name_in_the_network() -> None:
    assert settings_of("dispatcher", DispatcherSettings).allow_host == ("dispatcher",)


@pytest.mark.parametrize("address", ["0.0.0.0", "10.0.0.7", "[::]"])
def test_another_address_than_this_hosts_own_is_refused_without_keys(address: str) -> None:
    there = {"SLUICE_ADDRESS": address, "SLUICE_MODEL": str(ROOT / "demo_model" / "model")}
    with pytest.raises(StartupError, match=r"no key\. .*SLUICE_API_KEYS_FILE.*SLUICE_ADDRESS.*SLUICE_ALLOW_NO_KEY"):
        dispatcher.prepare(settings_of("dispatcher", DispatcherSettings, **there))
    dispatcher.prepare(settings_of("dispatcher", DispatcherSettings, **there, SLUICE_API_KEYS_FILE="/api-keys/a.toml"))
    dispatcher.prepare(settings_of("dispatcher", DispatcherSettings, **there, SLUICE_ALLOW_NO_KEY="true"))
    dispatcher.prepare(settings_of("dispatcher", DispatcherSettings, **{**there, "SLUICE_ADDRESS": "127.0.0.1"}))


def test_variables_reach_the_services_that_they_are_for() -> None:
    given = {"SLUICE_SYSTEM": "kunserve", "SLUICE_MODEL": "/models/a", "SLUICE_MODEL_NAME": "b"}
    of_workers = {"SLUICE_MAX_MODEL_LEN": "512", "SLUICE_DTYPE": "bfloat16", "SLUICE_MEMORY": "2GiB"}
    front = settings_of("dispatcher", DispatcherSettings, **given)
    assert (front.system, front.model, front.model_names()) == ("kunserve", Path("/models/a"), ("b",))
    assert settings_of("planner", PlannerSettings, **given).system == "kunserve"
    worker = settings_of("worker", WorkerSettings, **given, **of_workers, SLUICE_WORKERS="7")
    assert (worker.system, worker.model, worker.model_name()) == ("kunserve", Path("/models/a"), "b")
    assert (worker.max_model_len, worker.dtype, worker.memory, worker.host_workers) == (512, "bfloat16", 2 * 2**30, 7)
    assert filled(SERVICES["worker"]["scale"], SLUICE_WORKERS="7") == "7"


def test_workers_choose_type_and_memory_and_have_their_containers_name() -> None:
    worker = settings_of("worker", WorkerSettings)
    assert not {"dtype", "memory", "instance_id"} & worker.model_fields_set
    assert settings_of("worker", WorkerSettings, SLUICE_MEMORY="auto").model_fields_set == worker.model_fields_set
    assert worker.stage_address() == socket.gethostname()


def test_every_variable_is_in_the_table_of_the_page_with_its_default() -> None:
    text = "".join((ROOT / name).read_text() for name in ("docker-compose.yml", "docker-compose.gpu.yml"))
    rows = dict(re.findall(r"^\| (`[A-Z_`, ]+`) \|.*\| (.*) \|$", PAGE.partition("## Containers")[2], re.MULTILINE))
    told = {name for names in rows for name in re.findall(r"[A-Z_]+", names)}
    assert {name for name, _ in VARIABLE.findall(text)} == told
    for name, default in VARIABLE.findall(text):
        row = next(row for names, row in rows.items() if f"`{name}`" in names)
        assert not re.search(r"\d", default) or default in row, (name, default, row)


def test_the_setup_can_write_every_key_and_nobody_else_can() -> None:
    writers = {
        volume.split(":")[0]: name
        for name, service in SERVICES.items()
        for volume in filled(service["volumes"])
        if "-key:" in volume and not volume.endswith(":ro")
    }
    assert set(writers.values()) == {"setup"}
    assert set(writers) == {name for name in COMPOSE["volumes"] if name.endswith("-key")}


@pytest.mark.parametrize("target", ["worker", "worker-gpu"])
def test_a_worker_can_write_what_its_steps_have_cost_where_it_stays(target: str) -> None:
    service = SERVICES["worker"]
    folder = service["environment"]["SLUICE_WORKER_COSTS_KEPT"]
    assert f"worker-costs:{folder}" in service["volumes"]
    (made,) = [rest for keyword, rest in _stages()[target] if keyword == "RUN" and rest.startswith("mkdir")]
    assert re.match(rf"mkdir {folder}\b.* && chown {service['user']} {folder}\b", made), "as a new volume takes over"


def test_keys_are_written_by_the_operator_and_read_by_the_dispatcher_and_lie_where_somebody_says() -> None:
    for folder in ("api-keys", "/etc/sluice/keys"):
        given = {} if folder == "api-keys" else {"SLUICE_API_KEYS_FOLDER": folder}
        mounted = {name: filled(service["volumes"], **given) for name, service in SERVICES.items()}
        users = {name: volume for name, volumes in mounted.items() for volume in volumes if ":/api-keys" in volume}
        assert users["operator"] == f"{folder}:/api-keys"
        assert f"{folder}:/api-keys:ro" in mounted["dispatcher"]
        assert set(users) == {"operator", "dispatcher"}


def test_a_model_may_take_long_to_load_before_anybody_is_called_unhealthy() -> None:
    for name in ("worker", "dispatcher"):
        assert filled(SERVICES[name]["healthcheck"]["start_period"]) == "30m"
        assert filled(SERVICES[name]["healthcheck"]["start_period"], SLUICE_START_LIMIT="2h") == "2h"
    assert "/ready" in SERVICES["dispatcher"]["healthcheck"]["test"][-1]


def test_the_file_holds_no_secret() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"(?i)(password|secret|token)\w*: *[\"']?[A-Za-z0-9]", text)


def _config(*names: str, **variables: str) -> dict[str, Any]:
    """Return the services as docker-compose understands these files together."""
    program = compose_program()
    if program is None:
        pytest.skip("docker-compose is not installed")
    files = [word for name in names for word in ("-f", str(ROOT / name))]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    done = subprocess.run(
        [*program, *files, "config"], env=clean | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = yaml.safe_load(done.stdout)["services"]
    for service in services.values():
        service |= {"networks": list(service.get("networks", ())), "volumes": sorted(service["volumes"])}
    return services


def test_docker_compose_takes_the_file() -> None:
    assert set(_config("docker-compose.yml")) >= set(LASTING)


def test_the_file_for_gpus_gives_workers_a_card_and_changes_nothing_else() -> None:
    """As docker-compose joins both; where it is not installed, what the file says by itself is looked at."""
    assert set(GPU["services"]) == {"worker"}
    assert set(GPU["services"]["worker"]["environment"]) <= set(SERVICES["worker"]["environment"]) | {
        "SLUICE_WORKER_DEVICE"
    }
    assert GPU["services"]["worker"]["build"]["target"] in _stages()
    given = {"SLUICE_GPU": "3", "SLUICE_TAG": "1.2"}
    plain = _config("docker-compose.yml", **given)
    joined = _config("docker-compose.yml", "docker-compose.gpu.yml", **given)
    worker = joined.pop("worker")
    assert joined == {name: service for name, service in plain.items() if name != "worker"}
    (card,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (card["driver"], card["device_ids"]) == ("nvidia", ["3"])
    assert "gpu" in card["capabilities"]
    assert worker["image"] == "sluice-worker-gpu:1.2"
    assert worker["environment"]["SLUICE_WORKER_DEVICE"] == "cuda"
    assert worker["read_only"] is True


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    program = str(beside) if beside.is_file() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed; `make install` brings it")
    done = subprocess.run([program, str(ROOT / "docker" / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


INSTRUCTION = re.compile(r"(FROM|ARG|ENV|WORKDIR|COPY|RUN|USER|ENTRYPOINT|CMD)\s+(.*)", re.DOTALL)


def _instructions() -> list[tuple[str, str]]:
    """Return (keyword, arguments) of the Dockerfile, with continued lines joined and comments left out."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    found = []
    for line in joined:
        match = INSTRUCTION.fullmatch(line)
        assert match is not None, f"not understood: {line}"
        found.append((match[1], match[2]))
    return found


def _stages() -> dict[str, list[tuple[str, str]]]:
    stages: dict[str, list[tuple[str, str]]] = {}
    name = ""
    for keyword, rest in _instructions():
        if keyword == "FROM":
            name = rest.split(" AS ")[1]
            stages[name] = []
        stages[name].append((keyword, rest))
    return stages


def test_the_base_images_are_these_two() -> None:
    bases = {rest.split()[0] for keyword, rest in _instructions() if keyword == "FROM"}
    assert bases - set(_stages()) == {"python:3.11-slim", "nats:2.15"}
    assert "syntax=" not in (ROOT / "docker" / "Dockerfile").read_text()


@pytest.mark.parametrize("target", ["broker", "service", "worker", "worker-gpu"])
def test_what_is_shipped_runs_as_nobody_by_an_exec_form(target: str) -> None:
    stage = _stages()[target]
    assert [rest for keyword, rest in stage if keyword == "USER"] == ["65534:65534"]
    assert all(rest.startswith("[") for keyword, rest in stage if keyword in ("ENTRYPOINT", "CMD"))
    assert any(keyword == "ENTRYPOINT" for keyword, _ in stage)


def test_the_rules_for_dockerfiles_hold() -> None:
    """Those of hadolint that matter here: tags, no ADD, no cd or sudo, lists of apt removed, pip within constraints."""
    for keyword, rest in _instructions():
        if keyword == "RUN":
            assert not re.search(r"\b(sudo|curl|wget)\b|\bcd ", rest)
            for part in re.split(r"&&|\|\||;", rest):
                if "pip install" in part:
                    assert re.search(r"-c \S*constraints\.txt", part)
                if "apt-get install" in part:
                    assert "-y --no-install-recommends" in part
                    assert "rm -rf /var/lib/apt/lists/*" in rest
        if keyword == "COPY":
            assert not rest.startswith("."), "named folders only, so that nothing else is shipped"
    assert ("WORKDIR", "/app") in _instructions()
    assert any(keyword == "ENV" and "PIP_NO_CACHE_DIR=1" in rest for keyword, rest in _instructions())


def test_everything_that_is_copied_exists_and_is_not_ignored() -> None:
    ignored = set((ROOT / ".dockerignore").read_text().split())
    for keyword, rest in _instructions():
        if keyword == "COPY" and not rest.startswith("--from"):
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert source not in ignored
    assert {".git", ".dk", "tests"} <= ignored


def test_images_install_what_pyproject_asks_for_and_only_workers_torch(tmp_path: Path) -> None:
    (tmp_path / "client").mkdir()
    for source, target in (
        ("docker/requirements.py", "."),
        ("pyproject.toml", "."),
        ("client/pyproject.toml", "client"),
    ):
        shutil.copy(ROOT / source, tmp_path / target)

    def requirements(*extras: str) -> set[str]:
        command = [sys.executable, "requirements.py", *extras]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return {re.split(r"[<>=~\[]", line)[0] for line in done.stdout.splitlines()}

    service, worker = requirements(), requirements("worker")
    assert {"nats-py", "pydantic", "aiohttp", "numpy"} <= service
    assert worker - service == {"torch", "safetensors"}
    assert not any(name.startswith("sluice") for name in worker)
