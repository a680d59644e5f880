"""Static checks of the compose file and the Dockerfile: what can be known without a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.process.config import ServiceSettings
from shared.transport.nats_roles import BrokerRole

ROOT = Path(__file__).parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LASTING = sorted(set(SERVICES) - {"setup", "operator"})
"""Services that run as long as the cluster does; the other two do their work and end."""
SLUICE = sorted(name for name in SERVICES if name not in ("nats", "setup", "operator"))
WORKERS = {"worker-0", "worker-1"}

KNOWN_KEYS = {
    "top": {"services", "networks", "volumes"},
    "service": {
        *("build", "cap_drop", "command", "depends_on", "entrypoint", "environment", "healthcheck", "logging"),
        *("mem_limit", "network_mode", "networks", "pids_limit", "ports", "profiles", "read_only", "restart"),
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
        assert set(service["build"]) <= KNOWN_KEYS["build"], name
        assert set(service.get("healthcheck", {})) <= KNOWN_KEYS["healthcheck"], name


def test_every_name_that_is_used_is_defined() -> None:
    volumes = {volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]}
    assert {name for name in volumes if not name.startswith(".")} == set(COMPOSE["volumes"])
    networks = {name for service in SERVICES.values() for name in service.get("networks", [])}
    assert networks == set(COMPOSE["networks"])
    for service in SERVICES.values():
        assert set(service.get("depends_on", {})) <= set(SERVICES)


def test_only_the_api_is_published_and_only_to_this_host() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"dispatcher": ["127.0.0.1:8000:8000"]}
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
    assert re.fullmatch(r"\d+[mg]|\$\{SLUICE_WORKER_LIMIT:-\d+g\}", service["mem_limit"])
    assert "max-size" in service["logging"]["options"]
    assert service["build"]["context"] == "."
    assert service["build"]["network"] == "host"


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


def test_the_dispatcher_may_be_asked_by_its_name_in_the_network() -> None:
    (name,) = [name for name in SLUICE if name.startswith("dispatcher")]
    assert SERVICES[name]["environment"]["SLUICE_DISPATCHER_ALLOW_HOST"].split(",")[0] == name
    assert "--allow-no-key" in SERVICES[name]["command"]


def test_the_setup_can_write_every_key_and_nobody_else_can() -> None:
    writers = {
        volume.split(":")[0]: name
        for name, service in SERVICES.items()
        for volume in service["volumes"]
        if "-key:" in volume and not volume.endswith(":ro")
    }
    assert set(writers.values()) == {"setup"}
    assert set(writers) == {name for name in COMPOSE["volumes"] if name.endswith("-key")}


@pytest.mark.parametrize("name", sorted(WORKERS))
def test_a_worker_can_write_what_its_steps_have_cost_where_it_stays(name: str) -> None:
    folder = SERVICES[name]["environment"]["SLUICE_WORKER_COSTS_KEPT"]
    assert f"worker-costs:{folder}" in SERVICES[name]["volumes"]
    worker = (ROOT / "docker" / "Dockerfile").read_text().partition(" AS worker\n")[2]
    assert f"mkdir {folder} && chown {SERVICES[name]['user']} {folder}\n" in worker, "as a new volume takes over"


def test_only_workers_are_built_with_torch() -> None:
    targets = {name: service["build"]["target"] for name, service in SERVICES.items()}
    assert {name for name, target in targets.items() if target == "worker"} == WORKERS
    assert targets["nats"] == "broker"


def test_the_file_holds_no_secret() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    assert not re.search(r"(?i)(password|secret|token)\w*: *[\"']?[A-Za-z0-9]", text)


def _docker_compose() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") is None:
        return None
    found = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    return ["docker", "compose"] if found else None


def test_docker_compose_takes_the_file() -> None:
    program = _docker_compose()
    if program is None:
        pytest.skip("docker-compose is not installed")
    done = subprocess.run([*program, "-f", str(ROOT / "docker-compose.yml"), "config", "-q"], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


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


@pytest.mark.parametrize("target", ["broker", "service", "worker"])
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
                    assert "-c constraints.txt" in part
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
