"""Whatever is wrong with a file that somebody else wrote, whoever reads it says so in one sentence that names it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from cli.bench.datasets import read_samples
from cli.keys import keys
from cli.model import shipped_folder
from cli.nats_config import write_nats_config
from services.dispatcher.access.keys_file import read_keys
from services.dispatcher.text.generation_config import read_sampling_defaults
from services.dispatcher.text.model_folder import read_model_folder
from services.worker.models.checkpoint import find_tensors
from services.worker.models.spec import read_spec
from shared.cost import load_profile
from shared.errors import StartupError
from shared.process.config import ServiceSettings, load
from shared.transport.nats_config import BrokerConfig
from sim.scenarios.files import load_scenario
from sim.workload.trace import read_trace


def model(read: Callable[[Path], object], without: str = "") -> Callable[[Path], object]:
    """What reads the folder of the model that ships, one file of which is another, and one perhaps missing."""

    def read_beside(path: Path) -> object:
        for file in shipped_folder().iterdir():
            if file.name != without and not os.path.lexists(path.parent / file.name):
                (path.parent / file.name).symlink_to(file)
        return read(path.parent)

    return read_beside


def add_key(path: Path) -> object:
    return keys.main(["create", "--tenant", "a", "--file", str(path)], standalone_mode=False)


def ask_password(path: Path) -> object:
    return ServiceSettings(nats_user="a", nats_password_file=path).nats_credentials()


def make_broker_config(path: Path) -> object:
    return write_nats_config(path.parent.parent, BrokerConfig("127.0.0.1:4222", "/data"))


def read_settings(path: Path) -> object:
    os.chdir(path.parent)
    return load(ServiceSettings, "worker", [], {})


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("sluice.toml", read_settings),
    ("profile.toml", load_profile),
    ("scenario.toml", load_scenario),
    ("keys.toml", read_keys),
    ("other-keys.toml", add_key),
    ("nats-password", ask_password),
    ("monitor/password", make_broker_config),
    ("trace.csv", read_trace),
    ("data.json", read_samples),
    ("data.jsonl", read_samples),
    ("config.json", model(read_spec)),
    ("generation_config.json", model(read_spec)),
    ("model.safetensors.index.json", model(find_tensors, without="model.safetensors")),
    ("config.json", model(read_model_folder)),
    ("tokenizer.json", model(read_model_folder)),
    ("tokenizer_config.json", model(read_model_folder)),
    ("special_tokens_map.json", model(read_model_folder)),
    ("added_tokens.json", model(read_model_folder)),
    ("chat_template.jinja", model(read_model_folder)),
    ("generation_config.json", model(read_sampling_defaults)),
]


def hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def deep(path: Path) -> None:
    start = "a = " if path.suffix == ".toml" else ""
    path.write_text(start + "[" * 200_000)


KINDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "link to nothing": lambda path: path.symlink_to("nowhere"),
    "hole": hole,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\0\0"),
    "empty": Path.touch,
    "deep": deep,
}
READ_ALL_THE_SAME = {
    *((name, kind) for name in ("tokenizer.json", "chat_template.jinja") for kind in ("empty", "deep")),
    *((name, "empty") for name in ("sluice.toml", "other-keys.toml")),
}
"""What these readers take as it is: a text (of which another makes something), or nothing."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "read"), READERS, ids=[f"{index} {name}" for index, (name, _) in enumerate(READERS)])
def test_what_is_no_file_of_its_kind_is_one_sentence_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[Path], object], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    KINDS[kind](path)
    if (name, kind) in READ_ALL_THE_SAME:
        read(path)
        return
    with pytest.raises((StartupError, click.ClickException)) as refused:
        read(path)
    assert path.name in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("number", ["1e999", "NaN", "-1", "true", "9" * 400, '"1"', "[]"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_numbers_that_are_none_are_refused_by_name(tmp_path: Path, name: str, number: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"{name}": {number}}}')
    if (name, number) == ("top_k", "-1"):  # all tokens, as in a request
        assert read_sampling_defaults(tmp_path).top_k == 0
        return
    with pytest.raises(StartupError, match=f"{name} in .*generation_config.json is not a value that can be served"):
        read_sampling_defaults(tmp_path)
