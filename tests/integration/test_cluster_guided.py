"""Answers that are guided, through a whole cluster: a worker with a real model, whatever it would say by itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import AddedToken, Tokenizer

from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.cluster import Cluster, cluster
from tests.support.text_models import OPENER

pytestmark = [pytest.mark.kernels, pytest.mark.slow, pytest.mark.timeout(180)]

SHAPE: Final = CheckpointShape(vocab_size=384, seed=3, weight_std=0.05)
TAGS: Final = ("<think>", "</think>")


def thinking_checkpoint(folder: Path) -> Path:
    """Return a checkpoint whose vocabulary has think tags, and whose template may open the thought."""
    smaller, _ = stored_checkpoint(CheckpointShape(vocab_size=SHAPE.vocab_size - len(TAGS)))
    shutil.copytree(stored_checkpoint(SHAPE)[0], folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(smaller / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(OPENER)
    return folder


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = thinking_checkpoint(tmp_path_factory.mktemp("thinker"))
    flags = ("--model", str(folder), "--served-model-name", "thinker", "--memory", "96MiB", "--threads", "1")
    with cluster("--workers", "1", "--deterministic", *flags) as running:
        yield running


def ask(up: Cluster, **how: Any) -> Any:
    messages = [{"role": "user", "content": "How many?"}]
    return up.post("/v1/chat/completions", {"model": "thinker", "messages": messages, "max_tokens": 40, **how})


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 1.5, "n": 3, "seed": 4}, {"logprobs": True, "seed": 9}]
)
@pytest.mark.parametrize("budget", [0, 1, 7, 38, 39, 100])
def test_thinking_ends_with_its_budget(up: Cluster, budget: int, sampling: dict[str, Any]) -> None:
    """The model, which is random, closes the tag in one of some hundred tokens by itself."""
    thinking = {"thinking_token_budget": budget, "chat_template_kwargs": {"thinking": True}, "ignore_eos": True}
    body = ask(up, **thinking, **sampling)
    count = sampling.get("n", 1)
    num_thoughts = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert num_thoughts <= min(budget + 1, 40) * count, "the closing tag is one of them"
    for choice in body["choices"]:
        assert choice["finish_reason"] == "length"
        assert bool(choice["message"]["content"]) == (budget < 39)
    free = ask(up, chat_template_kwargs={"thinking": True}, ignore_eos=True, **sampling)
    if num_thoughts == min(budget + 1, 40) * count and budget:
        for choice, unbounded in zip(body["choices"], free["choices"], strict=True):
            thought = unbounded["message"]["reasoning"]
            assert thought.startswith(choice["message"]["reasoning"].rstrip("\ufffd")), "it thinks what it would think"
