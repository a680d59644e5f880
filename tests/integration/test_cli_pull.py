"""`sluice pull` with the real library against a hub on this machine, and without any hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.hub import HubModel, fetch
from shared.errors import StartupError
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub
from tests.support.processes import sluice

LIMIT_S = 60.0
NAME = "owner/tiny"
WEIGHTS = {"model-00001-of-00002.safetensors": b"\1" * 300_000, "model-00002-of-00002.safetensors": b"\2" * 5}
NEEDED = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b'{"top_k": 1}',
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": b"all of the weights",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    **WEIGHTS,
}
NOT_NEEDED = {
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_tiny.py": b"import os",
    "README.md": b"# Tiny",
    "consolidated.safetensors": b"the weights again",
    "model.fp16.safetensors": b"and again",
    "original/params.json": b"{}",
    "onnx/config.json": b"{}",
    "onnx/model.safetensors": b"x",
}


@pytest.fixture(scope="module")
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.models[NAME] = NEEDED | NOT_NEEDED
        running.models["owner/pickled"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
        running.models["owner/adapter"] = {"adapter_config.json": b"{}", "model.safetensors": b"x"}
        running.models["owner/gated"] = NEEDED
        running.gated.add("owner/gated")
        yield running


def pull(hub: FakeHub, home: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return sluice("pull", *argv, env={**os.environ, **settings, **env})


@pytest.mark.slow
def test_only_what_is_served_is_fetched_once_and_found_again_without_a_hub(hub: FakeHub, tmp_path: Path) -> None:
    hub.fetched.clear()
    result = pull(hub, tmp_path, NAME, HF_TOKEN="hf_secret")
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    assert folder.is_relative_to(tmp_path)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == NEEDED
    assert sorted(hub.fetched) == sorted(NEEDED)
    assert "Bearer hf_secret" in hub.tokens
    assert f"{NAME} 100% of 0.3 MB" in result.stderr
    assert f"{NAME} (digests) 100% of 0.3 MB" in result.stderr
    assert all(line.startswith(f"{NAME} ") for line in result.stderr.splitlines()), "nothing but progress"
    assert "hf_secret" not in result.stdout + result.stderr

    hub.is_down = True
    try:
        again = pull(hub, tmp_path, NAME)
    finally:
        hub.is_down = False
    assert (again.returncode, again.stdout) == (0, result.stdout)
    assert again.stderr == f"the hub does not answer; {NAME} is in its cache on this machine already\n"
    assert len(hub.fetched) == len(NEEDED)
    assert pull(hub, tmp_path, NAME, HF_HUB_OFFLINE="1").stdout == result.stdout

    env = {**os.environ, "HF_HOME": str(tmp_path)}
    (row,) = [line for line in sluice("ls", env=env).stdout.splitlines() if line.startswith(NAME)]
    assert row.split()[1:4] == [COMMIT[:8], "293.1", "KiB"]
    (shipped, cached) = json.loads(sluice("ls", "--json", env=env).stdout)
    assert (shipped["name"], cached["name"], cached["commit"]) == ("sluice-demo", NAME, COMMIT)


@pytest.mark.slow
@pytest.mark.parametrize("to", [(), ("--to", "model")])
def test_a_download_that_is_cut_goes_on_and_the_bytes_are_those_of_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    large = next(iter(WEIGHTS))
    hub.fetched.clear()
    hub.cuts[large] = 100_000
    result = pull(hub, tmp_path, NAME, *to)
    assert result.returncode == 0, result.stderr
    assert hub.fetched.count(large) == 2
    assert not hub.cuts
    assert {path.name: path.read_bytes() for path in Path(result.stdout.strip()).iterdir() if path.is_file()} == NEEDED


@pytest.mark.slow
@pytest.mark.parametrize("to", [(), ("--to", "model")])
@pytest.mark.parametrize("name", [next(iter(WEIGHTS)), "config.json"])
def test_bytes_that_are_not_the_hub_s_are_removed_and_fetched_again(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, to: tuple[str, ...]
) -> None:
    """Another file is untouched, and not fetched again."""
    monkeypatch.chdir(tmp_path)
    hub.spoiled.add(name)
    try:
        result = pull(hub, tmp_path, NAME, *to)
    finally:
        hub.spoiled.clear()
    assert (result.returncode, result.stdout) == (2, "")
    said = f"sluice: {NAME} has come with other bytes than the hub has, by their digests: {name}. They are removed"
    assert result.stderr.splitlines()[-1].startswith(said), result.stderr
    hub.fetched.clear()
    again = pull(hub, tmp_path, NAME, *to)
    assert again.returncode == 0, again.stderr
    assert hub.fetched == [name]
    assert Path(again.stdout.strip(), name).read_bytes() == NEEDED[name]


@pytest.mark.slow
def test_a_revision_goes_into_the_folder_that_was_named(hub: FakeHub, tmp_path: Path) -> None:
    target = tmp_path / "model"
    result = pull(hub, tmp_path / "home", f"{NAME}@{COMMIT}", "--to", str(target))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"{target}\n"
    assert {path.name for path in target.iterdir() if path.is_file()} == set(NEEDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("owner/none",), "the hub has no public model 'owner/none'. Check the id; a private model needs HF_TOKEN"),
        ((NAME, "--revision", "v9"), f"{NAME} has no revision 'v9'. Name a branch, a tag or a commit"),
        (("owner/gated",), "owner/gated is gated: its owners ask for terms to be accepted on the hub. Accept them"),
        (("owner/pickled",), "owner/pickled has no weights as safetensors. Choose one that has them; pickled weights"),
        (("owner/adapter",), "owner/adapter is not a model that can be served: it has no config.json"),
        (("no-id",), "'no-id' is no model id. Use owner/name"),
        ((f"{NAME}@a", "--revision", "b"), f"{NAME}@a and --revision b name two revisions. Name one"),
    ],
)
def test_what_cannot_be_had_is_one_line(hub: FakeHub, tmp_path: Path, argv: tuple[str, ...], line: str) -> None:
    hub.fetched.clear()
    result = pull(hub, tmp_path, *argv)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"sluice: {line}")
    assert result.stderr.count("\n") == 1, result.stderr
    assert hub.fetched == []


@pytest.mark.slow
def test_without_a_network_the_line_says_so(tmp_path: Path) -> None:
    result = pull(FakeHub(url="http://127.0.0.1:1"), tmp_path, NAME)
    assert result.returncode == 2
    assert result.stderr.startswith(f"sluice: {NAME} cannot be fetched from the hub (ConnectError). Check the network")
    assert result.stderr.count("\n") == 1, result.stderr
    offline = pull(FakeHub(url="http://127.0.0.1:1"), tmp_path, NAME, HF_HUB_OFFLINE="1")
    assert offline.stderr.startswith(f"sluice: {NAME} is not on this machine, and HF_HUB_OFFLINE forbids")


@pytest.mark.parametrize("url", ["hub", "ftp://hub", "http://", "http://[::1"])
def test_a_hub_that_is_no_url_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
    with pytest.raises(StartupError, match=r"HF_ENDPOINT is no URL: .*Use https://"):
        fetch(HubModel(NAME), tmp_path, lambda _what: lambda _done, _total: None)


@pytest.mark.slow
def test_up_takes_an_id_and_asks_the_hub_only_once(hub: FakeHub, tmp_path: Path) -> None:
    code = "from cli.model import find_model; import sys; m = find_model(sys.argv[1]); print(m.name, m.folder)"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}

    def find() -> str:
        argv = [sys.executable, "-c", code, NAME]
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout

    first = find()
    assert first.startswith(f"{NAME} {tmp_path}")
    hub.tokens.clear()
    assert find() == first
    assert not hub.tokens, "nothing was asked"


@pytest.mark.slow
def test_doctor_says_what_a_model_of_the_hub_takes_and_fetches_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 1000}
    config = json.dumps({"model_type": "llama", "dtype": "bfloat16", **shape}).encode()
    hub.models["owner/shaped"] = {**NEEDED, "config.json": config, "model.safetensors": bytes(2**20)}
    hub.fetched.clear()
    found = sluice(
        *("doctor", "owner/shaped", "--json"),
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"},
    )
    (model,) = [each for each in json.loads(found.stdout) if each["what"] == "model"]
    assert model["health"] == "ok", model
    assert model["said"].startswith("owner/shaped takes 2.6 MiB in float32")
    assert set(hub.fetched) == {"config.json"}
    assert not list(tmp_path.rglob("config.json")), "a cache with a part of a model would look like one that is whole"
