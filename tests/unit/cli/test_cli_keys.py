"""`sluice keys`: what it prints and writes is what a dispatcher takes, and what it takes back lets nobody in."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest

from cli.main import run_command
from services.dispatcher.access.key_ring import KeyRing
from services.dispatcher.access.keys_file import read_keys
from shared.api_keys import Scope, Tier
from tests.unit.cli.conftest import Refusal


def create(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run_command(["keys", "create", *argv]) == 0
    return capsys.readouterr().out


def test_the_printed_lines_let_the_printed_key_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--tenant", "acme.io", "--scopes", "infer, metrics", "--tier", "priority", "--tokens-per-min", "500"]
    key, _, lines = create(capsys, *argv, "--max-queued", "0").partition("\n")
    path = tmp_path / "keys.toml"
    path.write_text(lines)
    grant = KeyRing(read_keys(path)).find(key)
    assert grant is not None
    assert grant.scopes == {Scope.INFER, Scope.METRICS}
    assert (grant.tenant.name, grant.tenant.max_tier) == ("acme.io", Tier.PRIORITY)
    assert (grant.tenant.limits.tokens_per_min, grant.tenant.limits.max_queued) == (500, 0)
    assert grant.tenant.limits.requests_per_min is None
    assert key not in lines


def test_as_json_it_is_one_line_with_what_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    made = json.loads(create(capsys, "--tenant", "a", "--file", str(path), "--json"))
    assert (made["tenant"], made["entry"]) == ("a", path.read_text().lstrip())
    grant = KeyRing(read_keys(path)).find(made["key"])
    assert grant is not None
    assert run_command(["keys", "list", "--file", str(path), "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)] == [made["id"]]
    bare = json.loads(create(capsys, "--tenant", "b", "--json"))
    assert bare["key"] not in bare["entry"]


def test_keys_are_added_to_a_file_that_only_its_owner_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    keys = [
        create(capsys, "--tenant", tenant, "--file", str(path), *more).strip()
        for tenant, more in (("a", ["--max-concurrent", "2"]), ("b", []), ("a", []))
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    grants = KeyRing(read_keys(path))
    found = [grants.find(key) for key in keys]
    assert [grant.tenant.name for grant in found if grant is not None] == ["a", "b", "a"]
    assert [grant.tenant.limits.max_concurrent for grant in found if grant is not None] == [2, None, 2]
    assert not any(key in path.read_text() for key in keys)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--tenant", "a b"], "sluice: 'a b' is no name for a tenant. Use 1 to 64 letters"),
        (["--tenant", "a", "--scopes", "root"], "sluice: there is no scope 'root'. Choose from infer, batch, admin"),
        (["--tenant", "a", "--scopes", ","], "sluice: no scope is named. Choose from infer"),
        (["--tenant", "a", "--tier", "gold"], "sluice: Invalid value for '--tier'"),
        (["--tenant", "a", "--requests-per-min", "0"], "sluice: Invalid value for '--requests-per-min'"),
        (["--scopes", "infer"], "sluice: Missing option '--tenant'"),
        (["--tenant", "a", "--file", "/nowhere/keys.toml"], "sluice: /nowhere/keys.toml cannot be written: No such"),
    ],
)
def test_a_slip_is_one_line_and_makes_no_key(refusal: Refusal, argv: list[str], line: str) -> None:
    assert refusal("keys", "create", *argv).startswith(line)


def test_limits_of_a_tenant_that_exists_are_not_changed_in_passing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    path = tmp_path / "keys.toml"
    create(capsys, "--tenant", "a", "--file", str(path))
    before = path.read_text()
    said = refusal("keys", "create", "--tenant", "a", "--tier", "flex", "--file", str(path))
    assert "has a tenant 'a' already. Change it there, or leave out --tier" in said
    assert path.read_text() == before
    path.write_text("not [ toml")
    assert "is not valid TOML" in refusal("keys", "create", "--tenant", "b", "--file", str(path))


@pytest.mark.parametrize("by_key", [True, False])
def test_a_key_that_is_taken_back_lets_nobody_in_and_all_else_stays(
    by_key: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    made = [create(capsys, "--tenant", tenant, "--file", str(path)).strip() for tenant in ("a", "b", "a")]
    path.write_text("# ours\n" + path.read_text().replace('[tenants."b"]', '# of b\n[tenants."b"]') + "# the end\n")
    path.chmod(0o640)
    assert run_command(["keys", "list", "--file", str(path)]) == 0
    listed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(tenant, scopes) for _, tenant, scopes in listed] == [("a", "infer"), ("b", "infer"), ("a", "infer")]
    assert run_command(["keys", "list", "--json", "--file", str(path)]) == 0
    assert [each["id"] for each in json.loads(capsys.readouterr().out)] == [name for name, *_ in listed]
    named = made[0] if by_key else listed[0][0]
    assert run_command(["keys", "revoke", named, "--file", str(path)]) == 0
    assert capsys.readouterr().out == f"took back {listed[0][0]} of a; 2 are left\n"
    ring = KeyRing(read_keys(path))
    assert [ring.find(key) is not None for key in made] == [False, True, True]
    assert [line for line in path.read_text().splitlines() if line.startswith("#")] == ["# ours", "# of b", "# the end"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["keys.toml"]


def test_what_cannot_be_taken_back_is_said_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Refusal
) -> None:
    path = tmp_path / "keys.toml"
    key = create(capsys, "--tenant", "a", "--file", str(path)).strip()
    flags = ["--file", str(path)]
    assert refusal("keys", "revoke", key, *flags).startswith(f"sluice: it is the only key in {path}, and dispatchers")
    create(capsys, "--tenant", "a", *flags)
    assert "there is no such key" in refusal("keys", "revoke", "nobodys", *flags)
    assert "2 keys begin so" in refusal("keys", "revoke", "", *flags)
    text = path.read_text()
    inline = text.replace("[[keys]]", "#").split("#")[0]
    digests = re.findall(r"[0-9a-f]{64}", text)
    entries = ", ".join(f'{{sha256 = "{digest}", tenant = "a", scopes = ["infer"]}}' for digest in digests)
    path.write_text(f"keys = [{entries}]\n{inline}")
    assert "is not written as `sluice keys create` does it" in refusal(*["keys", "revoke", digests[0], *flags])
    assert path.read_text() == f"keys = [{entries}]\n{inline}"
    path.write_text("keys = [1]\n")
    assert "is no file of keys" in refusal("keys", "list", *flags)
