"""End tokens: the union of what the files of a folder name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.worker.config import WorkerSettings
from services.worker.load import check_start
from services.worker.models.end_tokens import MAX_END_TOKENS, EndTokens, read_end_tokens
from shared.errors import StartupError
from tests.support.checkpoints import EOS, PAD, CheckpointShape, stored_checkpoint
from tests.support.runners import load

pytestmark = pytest.mark.kernels

VOCAB_SIZE = 20
ADDED = {"added_tokens": [{"id": 7, "content": "<|im_end|>", "special": True}, {"id": 30, "content": "<far>"}]}
IM_END = {"eos_token": "<|im_end|>"}


def read(folder: Path, config: Any = None, **files: Any) -> EndTokens:
    """Read a folder with these files, by their names without `.json`."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_end_tokens(folder, {} if config is None else {"eos_token_id": config}, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        (None, {}, ()),
        (5, {}, (5,)),
        (0, {}, (0,)),
        ([7, 5, 7], {}, (5, 7)),
        ([None, 5], {"generation_config": {"eos_token_id": None}}, (5,)),
        (5, {"generation_config": {"eos_token_id": [9, 8]}}, (5, 8, 9)),
        (5, {"generation_config": {"eos_token_id": 6, "temperature": 0.6}}, (5, 6)),
        ("5", {"generation_config": {"eos_token_id": ["6", 9]}}, (5, 6, 9)),
        (5, {"tokenizer_config": IM_END, "tokenizer": ADDED}, (5, 7)),
        (7, {"tokenizer_config": IM_END, "tokenizer": ADDED}, (7,)),
        (5, {"tokenizer_config": {"eos_token": {"content": "<|im_end|>"}}, "tokenizer": ADDED}, (5, 7)),
        (5, {"special_tokens_map": IM_END, "tokenizer": ADDED}, (5, 7)),
        (5, {"special_tokens_map": IM_END, "tokenizer_config": {"eos_token": None}, "tokenizer": ADDED}, (5, 7)),
        (
            None,
            {
                "special_tokens_map": IM_END,
                "tokenizer_config": {"eos_token": "x"},
                "tokenizer": {**ADDED, "model": {"vocab": {"x": 3}}},
            },
            (3, 7),
        ),
        (None, {"tokenizer_config": {"eos_token": "x"}, "tokenizer": {"model": {"vocab": {"x": 3}}}}, (3,)),
        (
            None,
            {"tokenizer_config": {"eos_token": "x"}, "tokenizer": {"model": {"vocab": [["a", 0], ["x", -1]]}}},
            (1,),
        ),
        (5, {"tokenizer_config": {**IM_END, "added_tokens_decoder": {"11": {"content": "<|im_end|>"}}}}, (5, 11)),
        (
            5,
            {
                "tokenizer_config": {**IM_END, "added_tokens_decoder": {"9": {"content": []}, "8": {}, "7": []}},
                "tokenizer": ADDED,
            },
            (5, 7),
        ),
        (5, {"tokenizer_config": IM_END, "tokenizer": {}, "added_tokens": {"<|im_end|>": 12}}, (5, 12)),
        (5, {"tokenizer_config": {"eos_token": ""}, "tokenizer": ADDED}, (5,)),
        (5, {"tokenizer_config": {"eos_token": 3}, "tokenizer": ADDED}, (5,)),
    ],
)
def test_every_end_token_that_a_file_names_counts(
    tmp_path: Path, config: Any, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, config, **files) == EndTokens(expected, ())


@pytest.mark.parametrize(
    ("config", "files", "said"),
    [
        ([3, 20], {}, "config.json: eos_token_id '20' is no id of the model (0 to 19)"),
        ([3, -1], {}, "config.json: eos_token_id '-1' is no id"),
        ([3, True], {}, "config.json: eos_token_id 'True' is no id"),
        ([3, "</s>"], {}, "config.json: eos_token_id '</s>' is no id"),
        ([3, "9" * 5000], {}, "config.json: eos_token_id '999"),
        ([3, [4]], {}, "config.json: eos_token_id '[4]' is no id"),
        (3, {"generation_config": {"eos_token_id": [3, 99]}}, "generation_config.json: eos_token_id '99' is no id"),
        (
            3,
            {"tokenizer_config": {"eos_token": "<far>"}, "tokenizer": ADDED},
            "tokenizer_config.json: eos_token '<far>' has id 30, the model 0 to 19",
        ),
        (
            3,
            {"tokenizer_config": {"eos_token": "<nowhere>"}, "tokenizer": ADDED},
            "tokenizer_config.json: eos_token '<nowhere>' is in no vocabulary",
        ),
        (
            3,
            {"special_tokens_map": {"eos_token": "<nowhere>"}, "tokenizer": ADDED},
            "special_tokens_map.json: eos_token '<nowhere>' is in no vocabulary",
        ),
    ],
)
def test_what_is_no_id_of_the_model_is_left_out_and_its_file_named(
    tmp_path: Path, config: Any, files: dict[str, Any], said: str
) -> None:
    found = read(tmp_path, config, **files)
    assert found.ids == (3,)
    (sentence,) = found.left_out
    assert sentence.startswith(said)
    assert len(sentence) < 200


@pytest.mark.parametrize("name", ["generation_config", "tokenizer_config", "special_tokens_map"])
def test_a_broken_file_is_refused_by_name_rather_than_its_end_token_missed(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.json").write_text("{")
    with pytest.raises(StartupError, match=rf"{name}\.json"):
        read(tmp_path)


@pytest.mark.parametrize("entries", [["y" * 1000] * 9000, list(range(10**6))])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_more_than_any_model_has_are_refused_in_one_sentence(tmp_path: Path, name: str, entries: list[Any]) -> None:
    files = {} if name == "config" else {name: {"eos_token_id": entries}}
    said = rf"{name}\.json: eos_token_id has {len(entries)} entries, more than {MAX_END_TOKENS}"
    with pytest.raises(StartupError, match=said):
        read(tmp_path, None if files else entries, **files)
    assert len(read(tmp_path, entries[:MAX_END_TOKENS], generation_config={}).left_out) <= MAX_END_TOKENS


def test_a_worker_ends_answers_there_and_says_what_it_left_out(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stored_checkpoint(CheckpointShape())[0], tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 5000, "x"]}))
    names = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": "<pad>"}))
    with capture_logs() as logs:
        spec = check_start(WorkerSettings(instance_id="w0", model=folder, memory=2**25))
    assert spec.eos_token_ids == load(folder).info.eos_token_ids == (EOS, PAD, 9)
    (said,) = [entry for entry in logs if entry["event"] == "end_tokens_left_out"]
    assert said["count"] == 2
    assert said["first"].startswith("generation_config.json: eos_token_id '5000'")
