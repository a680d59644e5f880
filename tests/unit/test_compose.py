"""Static checks of the compose file: what can be known without a container engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OWN = sorted(name for name in SERVICES if name != "nats")


def test_only_the_api_is_published_and_only_to_this_host() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"dispatcher": ["127.0.0.1:8000:8000"]}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_containers_are_read_only_and_without_capabilities(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "privileged" not in service


@pytest.mark.parametrize("name", OWN)
def test_each_command_names_a_service_that_exists(name: str) -> None:
    module = SERVICES[name]["command"][0]
    assert (ROOT / module.replace(".", "/") / "__main__.py").is_file()


def test_base_images_are_pinned() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
    bases = [line.split()[1] for line in dockerfile.splitlines() if line.startswith("FROM ")]
    assert bases == ["python:3.11-slim", "base", "base", "base"]
    assert SERVICES["nats"]["image"] == "nats:2.15"


def test_only_workers_are_built_with_torch() -> None:
    targets = {name: SERVICES[name]["build"]["target"] for name in OWN}
    assert {name for name, target in targets.items() if target == "worker"} == {"worker-0", "worker-1"}
