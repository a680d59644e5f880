"""Keys: what a file may hold, whom it lets in, and what a change of it does."""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.dispatcher import __main__ as dispatcher
from services.dispatcher.access.access import RELOAD_PERIOD_S, Access, Denial, Denied
from services.dispatcher.access.grants import Grant, Tenant, TenantLimits, grant_of_tenant
from services.dispatcher.access.key_ring import KeyRing
from services.dispatcher.access.keys_file import read_keys
from services.dispatcher.access.throttle import BURST, MAX_ADDRESSES, WrongKeyThrottle
from services.dispatcher.config import DispatcherSettings
from shared.addresses import check_reachable
from shared.api_keys import KEY_PREFIX, Scope, Tier, hash_key, make_key
from shared.errors import ConfigError, StartupError
from shared.process.config import load

KEY = "sk-sluice-of-a-test"
FILE = f"""
[tenants.acme]
tier = "priority"
requests_per_min = 60
tokens_per_min = 1000
max_concurrent = 4
max_queued = 0

[[keys]]
sha256 = "{hash_key(KEY)}"
tenant = "acme"
scopes = ["infer", "metrics"]
"""

ABSURD = ["keys = " + "[" * 100_000, "a" + ".a" * 400 + " = 1", "keys = 0x" + "f" * 5000, 'keys = ["\\u0000"]', "\0"]
"""Each ended the dispatcher that read it, or the whole cluster."""


def write(folder: Path, text: str = FILE) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    return path


def access(path: Path | None, key: str = "", now_s: float = 0.0) -> Access:
    return Access(key, path, lambda: now_s)


def test_a_key_is_random_and_its_digest_is_sha_256() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(KEY_PREFIX) and len(key) > 50 for key in keys)
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_file_gives_each_key_its_tenant_scopes_tier_and_limits(tmp_path: Path) -> None:
    grants = read_keys(write(tmp_path))
    tenant = Tenant("acme", Tier.PRIORITY, TenantLimits(60, 1000, 4, 0))
    assert grants == {hash_key(KEY): Grant(tenant, frozenset({Scope.INFER, Scope.METRICS}), "tenant:acme")}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('tenant = "acme"', 'tenant = "acne"', "keys.0 belongs to 'acne', but there is no [tenants.acne]"),
        ('"infer", "metrics"', '"root"', "wrong at 'keys.0.scopes.0': Input should be 'infer', 'batch', 'admin' or"),
        ('"infer", "metrics"', "", "wrong at 'keys.0.scopes'"),
        ("requests_per_min = 60", "requests_per_min = 0", "wrong at 'tenants.acme.requests_per_min'"),
        ("requests_per_min = 60", 'requests_per_min = "60"', "wrong at 'tenants.acme.requests_per_min'"),
        ("requests_per_min = 60", "request_per_min = 60", "wrong at 'tenants.acme.request_per_min'"),
        ('tier = "priority"', 'tier = "gold"', "wrong at 'tenants.acme.tier'"),
        (hash_key(KEY), KEY, "wrong at 'keys.0.sha256'"),
        ("[tenants.acme]", '[tenants."a b"]', "'a b' is no name for a tenant"),
        ("[[keys]]", "[keys]", "wrong at 'keys'"),
        ("[tenants.acme]", "[tenants", "is wrong: "),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(tmp_path: Path, old: str, new: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_keys(write(tmp_path, FILE.replace(old, new)))
    assert problem in str(refusal.value)
    assert "sluice keys create" in str(refusal.value)
    assert KEY not in str(refusal.value)


def test_a_file_without_keys_or_with_a_key_twice_or_no_file_is_refused(tmp_path: Path) -> None:
    twice = FILE + FILE[FILE.index("[[keys]]") :]
    for text, problem in ((FILE[: FILE.index("[[keys]]")], "'keys'"), (twice, "keys.1 stands there twice")):
        with pytest.raises(ConfigError) as refusal:
            read_keys(write(tmp_path, text))
        assert problem in str(refusal.value)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ABSURD, ids=lambda text: text[:12])
async def test_an_absurd_file_is_refused_at_the_start_and_changes_nothing_later(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=r"the file of keys .* is wrong"):
        read_keys(path)
    path = write(tmp_path, FILE)
    keys = access(path)
    path.write_text(text)
    assert not await keys.reload()
    assert isinstance(keys.authenticate(f"Bearer {KEY}", "1.2.3.4"), Grant)


@pytest.mark.slow
@given(st.lists(st.text(max_size=20), unique=True, max_size=20), st.text(max_size=20))
def test_a_ring_finds_exactly_its_own_keys(keys: list[str], other: str) -> None:
    grants = {hash_key(key): grant_of_tenant(Tenant(f"t{index}"), frozenset()) for index, key in enumerate(keys)}
    ring = KeyRing(grants)
    assert len(ring) == len(keys)
    for index, key in enumerate(keys):
        found = ring.find(key)
        assert found is not None
        assert found.tenant.name == f"t{index}"
    assert (ring.find(other) is None) == (other not in keys)


def test_keys_whose_digests_begin_alike_are_told_apart() -> None:
    """No two keys with the same 8 digits are known; so a ring is asked for a key that is not the digest's."""
    digest = hash_key(KEY)
    near = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    ring = KeyRing({near: grant_of_tenant(Tenant("near"), frozenset())})
    assert ring.find(KEY) is None
    ring = KeyRing(
        {near: grant_of_tenant(Tenant("near"), frozenset()), digest: grant_of_tenant(Tenant("own"), frozenset())}
    )
    found = ring.find(KEY)
    assert found is not None
    assert found.tenant.name == "own"


def test_without_keys_everybody_comes_in_and_callers_are_kept_apart_by_their_header() -> None:
    open_to_all = access(None)
    assert not open_to_all.asks_for_keys
    grants = [open_to_all.authenticate(header, "1.2.3.4") for header in ("", "Bearer a", "Basic x")]
    assert [grant.identity for grant in grants if isinstance(grant, Grant)] == ["", "Bearer a", "Basic x"]


@pytest.mark.parametrize(
    ("headers", "outcome"),
    [
        (["", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Token {KEY}"], Denial.NO_KEY),
        ([f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer " + "x" * 10_000, f"Bearer {KEY} x"], Denial.WRONG_KEY),
        ([f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "], "acme"),
    ],
)
def test_a_request_is_denied_without_the_right_bearer_key_and_let_in_as_its_tenant_with_it(
    tmp_path: Path, headers: list[str], outcome: Denial | str
) -> None:
    guarded = access(write(tmp_path))
    for header in headers:
        found = guarded.authenticate(header, "1.2.3.4")
        assert (found.tenant.name if isinstance(found, Grant) else found.reason) == outcome


def test_one_key_of_the_settings_may_infer_and_read_metrics_also_beside_a_file(tmp_path: Path) -> None:
    both = access(write(tmp_path), key="k" * 16)
    names = []
    for key in ("k" * 16, KEY):
        grant = both.authenticate(f"Bearer {key}", "1.2.3.4")
        assert isinstance(grant, Grant)
        assert grant.scopes == {Scope.INFER, Scope.METRICS}
        names.append(grant.tenant.name)
    assert names == ["default", "acme"]


def test_many_wrong_keys_from_one_address_are_throttled_and_right_ones_and_other_addresses_never(
    tmp_path: Path,
) -> None:
    """1 000 within a second: the burst is answered, and one more each second after it."""
    now_s = 0.0
    guarded = Access("", write(tmp_path), lambda: now_s)
    outcomes = []
    for index in range(1000):
        now_s = index / 1000
        outcomes.append(guarded.authenticate("Bearer wrong", "1.2.3.4"))
        assert isinstance(guarded.authenticate(f"Bearer {KEY}", "1.2.3.4"), Grant)
    wrong = [outcome for outcome in outcomes if outcome == Denied(Denial.WRONG_KEY)]
    throttled = [outcome for outcome in outcomes if isinstance(outcome, Denied) and outcome.wait_s]
    assert len(wrong) == BURST
    assert len(throttled) == 1000 - BURST
    assert outcomes.index(throttled[0]) == BURST
    assert all(outcome.reason is Denial.TOO_MANY_WRONG_KEYS and outcome.wait_s <= 1 for outcome in throttled)
    assert guarded.authenticate("Bearer wrong", "1.2.3.5") == Denied(Denial.WRONG_KEY)
    now_s += throttled[-1].wait_s
    assert guarded.authenticate("Bearer wrong", "1.2.3.4") == Denied(Denial.WRONG_KEY)


@pytest.mark.parametrize(
    ("wrong", "same", "other"),
    [
        ("2001:db8::{:x}", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ("10.0.0.7", "::ffff:10.0.0.7", "10.0.0.8"),
        ("::ffff:10.0.0.7", "10.0.0.7", "::ffff:10.0.0.8"),
        ("::ffff:10.0.0.7", "::ffff:a00:7", "::1"),
    ],
)
def test_a_network_of_ipv6_counts_as_one_address_and_an_ipv4_address_in_ipv6_as_itself(
    wrong: str, same: str, other: str
) -> None:
    throttle = WrongKeyThrottle()
    assert [throttle.note(wrong.format(index), 0.0) for index in range(BURST)] == [0.0] * BURST
    assert throttle.note(other, 0.0) == 0.0
    assert throttle.note(same, 0.0) > 0


def test_the_memory_for_addresses_is_bounded() -> None:
    throttle = WrongKeyThrottle()
    for index in range(MAX_ADDRESSES + 10):
        throttle.note(f"10.{index // 65536}.{index // 256 % 256}.{index % 256}", 1.0)
    assert len(throttle) == MAX_ADDRESSES
    assert throttle.note("unix", 1.0) == 0.0


async def test_a_changed_file_takes_effect_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path)
    guarded = access(path)
    assert not await guarded.reload()
    other = "sk-sluice-another"
    write(tmp_path, FILE.replace(hash_key(KEY), hash_key(other)))
    os.utime(path, (1, 1))
    assert await guarded.reload()
    assert isinstance(guarded.authenticate(f"Bearer {other}", "a"), Grant)
    assert guarded.authenticate(f"Bearer {KEY}", "a") == Denied(Denial.WRONG_KEY)
    for text in ("broken [", None):
        path.unlink() if text is None else path.write_text(text)
        assert not await guarded.reload()
        assert isinstance(guarded.authenticate(f"Bearer {other}", "a"), Grant)
    write(tmp_path)
    assert await guarded.reload()
    assert isinstance(guarded.authenticate(f"Bearer {KEY}", "a"), Grant)


def damage(path: Path, how: str) -> None:
    """Make the file one that cannot be used."""
    if how == "gone":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_text({"empty": "", "wrong": "broken [", "no keys": FILE[: FILE.index("[[keys]]")]}[how])


def mend(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    path.write_text(FILE)


DAMAGES = ["gone", "a folder", "empty", "wrong", "no keys"]


@pytest.mark.parametrize("how", DAMAGES)
async def test_the_last_good_keys_hold_over_a_restart_whatever_became_of_the_file(tmp_path: Path, how: str) -> None:
    path, kept = write(tmp_path), tmp_path / "kept.toml"
    Access("", path, lambda: 0.0, kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    other = "sk-sluice-another"
    for _ in range(2):
        damage(path, how)
        again = Access("", path, lambda: 0.0, kept)
        assert isinstance(again.authenticate(f"Bearer {KEY}", "a"), Grant)
        assert again.authenticate(f"Bearer {other}", "a") == Denied(Denial.WRONG_KEY)
        assert again.authenticate("", "a") == Denied(Denial.NO_KEY)
        assert not await again.reload()
        mend(path)
        assert await again.reload(), "the file counts again as soon as it is good"
    path.write_text(FILE.replace(hash_key(KEY), hash_key(other)))
    assert await again.reload()
    path.unlink()
    last = Access("", path, lambda: 0.0, kept)
    assert isinstance(last.authenticate(f"Bearer {other}", "a"), Grant), "what was read while it ran is kept too"
    assert last.authenticate(f"Bearer {KEY}", "a") == Denied(Denial.WRONG_KEY)


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("key", ["", "k" * 16])
async def test_without_a_place_for_a_copy_nobody_is_let_in_until_the_file_is_good(
    tmp_path: Path, how: str, key: str
) -> None:
    path = write(tmp_path)
    damage(path, how)
    guarded = access(path, key)
    for header in ("", f"Bearer {KEY}", "Bearer x", f"Bearer {key}"):
        assert guarded.authenticate(header, "a") == Denied(Denial.KEYS_UNKNOWN, RELOAD_PERIOD_S)
    assert guarded.asks_for_keys
    assert not await guarded.reload()
    mend(path)
    assert await guarded.reload()
    assert isinstance(guarded.authenticate(f"Bearer {KEY}", "a"), Grant)
    assert guarded.authenticate("", "a") == Denied(Denial.NO_KEY)


@pytest.mark.parametrize("how", DAMAGES)
def test_a_first_start_with_a_place_for_a_copy_is_refused_with_the_files_own_problem(tmp_path: Path, how: str) -> None:
    path, kept = write(tmp_path), tmp_path / "kept.toml"
    damage(path, how)
    for text in (None, "broken ["):
        if text is not None:
            kept.write_text(text)
        with pytest.raises(ConfigError, match=r"keys\.toml"):
            Access("", path, lambda: 0.0, kept)


@pytest.mark.parametrize("place", ["none", "empty", "good"])
def test_a_dispatcher_that_is_asked_refuses_the_file_where_one_that_starts_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(dispatcher, "load_text", lambda _settings: None)
    path, kept = write(tmp_path), tmp_path / "kept.toml"
    if place == "good":
        kept.write_text(path.read_text())
    damage(path, "wrong")
    files = {"api_keys_file": path, "api_keys_kept": None if place == "none" else kept}
    settings = DispatcherSettings.model_validate({"model": tmp_path, **files})
    with pytest.raises(ConfigError, match="keys") if place == "empty" else nullcontext():
        dispatcher.check(settings)


async def test_a_copy_that_cannot_be_written_keeps_nobody_out(tmp_path: Path) -> None:
    guarded = Access("", write(tmp_path), lambda: 0.0, tmp_path / "nowhere" / "kept.toml")
    assert isinstance(guarded.authenticate(f"Bearer {KEY}", "a"), Grant)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "[::]", "0", "10.1", "::ffff:10.0.0.1", "[::1", "1.localhost.example.org", "example.org"],
)
def test_an_address_that_others_reach_needs_a_key_or_somebody_who_says_that_it_does_not(host: str) -> None:
    with pytest.raises(StartupError) as refusal:
        check_reachable(host, has_keys=False, allow_no_key=False)
    assert "--api-keys-file" in str(refusal.value)
    assert "--allow-no-key" in str(refusal.value)
    check_reachable(host, has_keys=True, allow_no_key=False)
    check_reachable(host, has_keys=False, allow_no_key=True)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.9.9.9",
        "127.1",
        "0x7f.1",
        "2130706433",
        "::1",
        "[::1]",
        "0:0::1",
        "::ffff:127.0.0.1",
        "localhost",
        "LOCALHOST",
    ],
)
def test_this_machines_own_address_needs_none(host: str) -> None:
    check_reachable(host, has_keys=False, allow_no_key=False)


@pytest.mark.parametrize(("published", "is_refused"), [("", True), ("127.0.0.1", False), ("10.0.0.7", True)])
def test_in_a_container_it_is_the_published_address_that_needs_keys(published: str, is_refused: bool) -> None:
    flags = ["--model", str(Path(__file__).parents[3] / "demo_model" / "model"), "--host", "0.0.0.0"]
    settings = load(DispatcherSettings, "dispatcher", flags, {"SLUICE_DISPATCHER_PUBLISHED_HOST": published})
    with pytest.raises(StartupError, match="no key") if is_refused else nullcontext():
        dispatcher.prepare(settings)
