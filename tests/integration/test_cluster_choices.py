"""Choices, log-probabilities, names and limits through the whole cluster: real processes, a real model, the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from services.dispatcher.text.detokenizer import load_table
from services.dispatcher.text.token_names import TokenNames
from tests.support.checkpoints import CheckpointShape, stored_checkpoint
from tests.support.cluster import Cluster, cluster

SHAPE = CheckpointShape(seed=5, weight_std=0.05)
PROMPT = [7, 8, 9, 10, 11, 200, 201, 202, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50]
CONTEXT = 128
NUM_CHOICES = 5

pytestmark = [pytest.mark.kernels, pytest.mark.timeout(120)]


@dataclass
class Served:
    """A deterministic cluster of one worker, and its client."""

    cluster: Cluster
    client: openai.OpenAI
    reference: PreTrainedModel
    ids: dict[str, int]
    """By the name of the token."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    folder, reference = stored_checkpoint(SHAPE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = TokenNames(tokenizer, load_table(tokenizer))
    ids = {names.name_of(token_id): token_id for token_id in range(SHAPE.vocab_size)}
    assert len(ids) == SHAPE.vocab_size
    flags = ["--model", str(folder), "--served-model-name", "mine,org/other", "--memory", "256MiB"]
    flags += ["--threads", "1", "--deterministic", "--max-model-len", str(CONTEXT)]
    with cluster(*flags) as running:
        with openai.OpenAI(base_url=running.url + "/v1", api_key="a", max_retries=0) as client:
            yield Served(running, client, reference, ids)
        running.wait_until_idle()


def test_choice_i_is_what_the_seed_plus_i_gives_alone(served: Served) -> None:
    whole = served.client.completions.create(model="mine", prompt=PROMPT, n=NUM_CHOICES, seed=40, max_tokens=24)
    texts = [choice.text for choice in whole.choices]
    for index, text in enumerate(texts):
        alone = served.client.completions.create(model="mine", prompt=PROMPT, seed=40 + index, max_tokens=24)
        assert alone.choices[0].text == text
    assert len(set(texts)) == NUM_CHOICES
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(PROMPT)


def test_streamed_choices_are_the_whole_ones(served: Served) -> None:
    whole = served.client.completions.create(model="mine", prompt=PROMPT, n=NUM_CHOICES, seed=1, max_tokens=24)
    texts = [""] * NUM_CHOICES
    for event in served.client.completions.create(
        model="mine", prompt=PROMPT, n=NUM_CHOICES, seed=1, max_tokens=24, stream=True
    ):
        for choice in event.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_log_probabilities_are_those_of_the_reference_whatever_the_temperature(served: Served) -> None:
    """The tokens are found by their names."""
    answer = served.client.completions.create(
        model="mine",
        prompt=PROMPT,
        seed=3,
        max_tokens=12,
        logprobs=3,
        temperature=1.7,
        frequency_penalty=1.5,
        logit_bias={"60": 3},
        extra_body={"ignore_eos": True},
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    ids = [served.ids[name] for name in told.tokens or []]
    assert len(ids) == 12
    with torch.inference_mode():
        logits = served.reference(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    chosen = expected[torch.arange(len(ids)), torch.tensor(ids)]
    assert told.token_logprobs == pytest.approx(chosen.tolist(), abs=1e-3)
    for row, top in zip(expected, told.top_logprobs, strict=True):
        assert sorted(top.values())[-3:] == pytest.approx(sorted(row.topk(3).values.tolist()), abs=1e-3)


def test_a_prompt_is_cached_for_the_key_and_the_salt_that_sent_it_and_its_text_is_the_same(served: Served) -> None:
    """70 tokens are four whole blocks of 16, and the last token is always computed: 64 can be found."""
    prompt = [100 + index for index in range(70)]

    def send(key: str, **more: str) -> tuple[int, str]:
        answer = served.client.with_options(api_key=key).completions.create(
            model="mine", prompt=prompt, seed=9, max_tokens=8, extra_body=more
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0, answer.choices[0].text

    told = [send("a"), send("a"), send("b"), send("b"), send("a", cache_salt="x"), send("a", cache_salt="x"), send("a")]
    assert [cached for cached, _ in told] == [0, 64, 0, 64, 0, 64, 64]
    assert len({text for _, text in told}) == 1


def test_choices_share_their_prompt(served: Served) -> None:
    """Each of the four siblings finds at least five whole blocks of 16, 80 of the 90 tokens."""
    served.cluster.wait_until_idle()
    before = served.cluster.total("num_prefix_cache_hits_total")
    prompt = [300 - index for index in range(90)]
    answer = served.client.completions.create(model="mine", prompt=prompt, n=NUM_CHOICES, seed=2, max_tokens=8)
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    served.cluster.wait_until_idle()
    assert served.cluster.total("num_prefix_cache_hits_total") - before >= (NUM_CHOICES - 1) * 80


def test_the_limit_of_the_workers_is_the_limit_of_every_name(served: Served) -> None:
    models = served.client.models.list().data
    assert [(model.id, model.model_dump()["max_model_len"]) for model in models] == [
        ("mine", CONTEXT),
        ("org/other", CONTEXT),
    ]
    assert served.client.models.retrieve("org/other").id == "org/other"
    answer = served.client.completions.create(
        model="org/other", prompt=PROMPT, max_tokens=10**6, extra_body={"ignore_eos": True}
    )
    assert answer.model == "mine"
    assert answer.usage is not None
    assert answer.usage.total_tokens == CONTEXT
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.completions.create(model="mine", prompt=[5] * CONTEXT)
    assert refused.value.code == "context_length_exceeded"
