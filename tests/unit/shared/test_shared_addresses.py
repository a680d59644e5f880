"""How hosts are written in settings and in URLs, and the cluster's own URL."""

from __future__ import annotations

from pathlib import Path

import pytest
from yarl import URL

from cli.cluster.settings import UpSettings
from services.dispatcher.config import DispatcherSettings
from services.planner.config import PlannerSettings
from services.worker.config import WorkerSettings
from shared.addresses import host_and_port, is_own_address, normal_host
from shared.errors import ConfigError
from shared.process.config import Settings, load

HOSTS: list[tuple[type[Settings], str, tuple[str, ...]]] = [
    (UpSettings, "host", ()),
    (DispatcherSettings, "host", ("--model", "m")),
    (PlannerSettings, "metrics_host", ()),
    (WorkerSettings, "stage_host", ("--model", "m")),
    (WorkerSettings, "stage_advertise", ("--model", "m")),
]
"""Every setting that takes a host, and what else its process asks for."""


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("[::1]", "::1"),
        ("0:0:0::1", "::1"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("[::ffff:127.0.0.1]", "127.0.0.1"),
        ("[FE80::1%eth0]", "fe80::1%eth0"),
        ("127.1", "127.0.0.1"),
        ("0x7F.1", "127.0.0.1"),
        ("0177.0.0.01", "127.0.0.1"),
        ("2130706433", "127.0.0.1"),
        ("0", "0.0.0.0"),
        ("10.0.0.7", "10.0.0.7"),
        ("worker-1.local", "worker-1.local"),
        ("256.1.1.1", "256.1.1.1"),
        ("1.2.3.4.5", "1.2.3.4.5"),
    ],
)
def test_a_host_is_an_address_in_its_usual_spelling_or_a_name(given: str, host: str) -> None:
    """Numbers that are no address are left to the system, which knows no such name."""
    assert normal_host(given) == host
    assert normal_host(host) == host


@pytest.mark.parametrize(
    "given",
    ["", "[", "]", "[]", "[::1", "::1]", "[10.0.0.7]", "[a]", "[::1]:80", "a:80", "::1:x", "http://a", "a b", "a/b"],
)
@pytest.mark.parametrize(("settings", "name", "flags"), HOSTS)
def test_a_url_or_a_port_is_no_host(
    settings: type[Settings],
    name: str,
    flags: tuple[str, ...],
    given: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    flag = f"--{name.replace('_', '-')}"
    if name == "stage_advertise" and not given:
        return  # that of `stage_host`
    with pytest.raises(ConfigError) as refusal:
        load(settings, "", [*flags, flag, given], {})
    assert str(refusal.value) == (
        f"sluice: {flag}: '{given}' is no address or name of a host (allowed: no scheme, no port)"
    )


@pytest.mark.parametrize(("settings", "name", "flags"), HOSTS)
def test_every_host_may_stand_in_brackets(
    settings: type[Settings], name: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = load(settings, "", [*flags, f"--{name.replace('_', '-')}", "[::1]"], {})
    assert getattr(found, name) == "::1"
    assert is_own_address(getattr(found, name))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fd00::7", "localhost"])
def test_a_url_leads_to_its_host(host: str) -> None:
    url = URL(f"http://{host_and_port(host, 8000)}")
    assert (url.host, url.port) == (host, 8000)
