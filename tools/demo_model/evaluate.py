"""Measures the model that ships: perplexity on held-out conversations, and how many sampled answers are accepted.

    python -m tools.demo_model.evaluate --model demo_model/model

The training conversations are written once more from their seed to prove that none of the prompts was among them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model import grammar
from tools.demo_model.checker import check
from tools.demo_model.data import Encoder, conversations
from tools.demo_model.grammar import Conversation, Exchange, Grammar, Turn

SEED = 77
"""Of the held-out prompts and of the sampling."""

PLAN: tuple[tuple[str, int, Sequence[Exchange]], ...] = (
    ("stories", 320, [grammar.FULL_STORY_EXCHANGE]),
    ("questions about a story", 70, grammar.ABOUT_STORY),
    ("another story", 30, [grammar.ANOTHER_EXCHANGE]),
    ("facts", 60, grammar.FACTS),
    ("sums", 40, grammar.SUMS),
    ("company", 12, grammar.COMPANY),
    ("unknown subjects", 60, [grammar.FOREIGN_EXCHANGE]),
)
"""What is asked, how often, and which kinds of turn answer it."""

_AFTER_STORY = {"questions about a story", "another story"}


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt: the chat up to the user's last message.

    Attributes:
        subject: its row in `PLAN`.
        turns: as the grammar writes them; the last one's answer is not shown to the model.
    """

    subject: str
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat without the answer to be sampled."""
        return Conversation("", self.turns).messages[:-1]


def held_out_prompts(seed: int) -> list[Prompt]:
    """Return the prompts of the plan, all different."""
    writer = Grammar(seed, held_out=True)
    found: dict[str, Prompt] = {}
    for subject, count, exchanges in PLAN:
        wanted = len(found) + count
        index = 0
        while len(found) < wanted:
            index += 1
            assert index < 100 * count, f"too few different prompts: {subject}"
            before = [writer.turn(grammar.FULL_STORY_EXCHANGE, {})] if subject in _AFTER_STORY else []
            turn = writer.turn(exchanges[index % len(exchanges)], before[-1].env if before else {})
            prompt = Prompt(subject, (*before, turn))
            found.setdefault(json.dumps(prompt.messages).lower(), prompt)
    return list(found.values())


def assert_disjoint(prompts: Iterable[Prompt], training: Iterable[Conversation]) -> int:
    """Return the number of training conversations after comparing all of them with the prompts.

    Raises:
        AssertionError: a story's combination of kind, place and wish, or a prompt about anything else, was trained on.
    """
    asked = {turn.prompt.lower() for prompt in prompts for turn in prompt.turns if _triple(turn) is None}
    combinations = {triple for prompt in prompts for turn in prompt.turns if (triple := _triple(turn))}
    count = 0
    for conversation in training:
        count += 1
        for turn in conversation.turns:
            triple = _triple(turn)
            assert triple not in combinations, f"trained on {triple}"
            assert triple or turn.prompt.lower() not in asked, f"trained on {turn.prompt!r}"
    return count


def _triple(turn: Turn) -> tuple[str, ...] | None:
    if "wish" not in turn.env:
        return None
    return tuple(turn.env[variable].key for variable in ("kind", "place", "wish"))


@torch.inference_mode()
def sample(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    chats: Sequence[list[dict[str, str]]],
    batch_size: int = 64,
) -> list[str | None]:
    """Return one sampled answer for each chat, with the model's own defaults; None for one without an end.

    Temperature and the limit of tokens are those of generation_config.json; nothing else narrows the choice.
    """
    answers: list[str | None] = []
    for start in range(0, len(chats), batch_size):
        texts = [
            tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            for chat in chats[start : start + batch_size]
        ]
        encoded = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
        output = cast("Any", model).generate(**encoded, top_k=0)  # its annotations contradict its class
        for row in output[:, encoded["input_ids"].shape[1] :].tolist():
            ended = tokenizer.eos_token_id in row
            ids = row[: row.index(tokenizer.eos_token_id)] if ended else row
            answers.append(str(tokenizer.decode(ids)) if ended else None)
        sys.stderr.write(f"sampled {len(answers)}/{len(chats)}\r")
        sys.stderr.flush()
    sys.stderr.write("\n")
    return answers


@torch.inference_mode()
def perplexity(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, chats: Sequence[Conversation]
) -> dict[str, float]:
    """Return perplexity per token of the assistant's answers, and the grammar's own.

    The grammar's is exp of the mean of minus the log probability of its choices, spread over the same tokens: what a
    model with perfect knowledge of the grammar would reach, or a little above it.
    """
    encoder = Encoder(tokenizer)
    nats = grammar_nats = 0.0
    tokens = 0
    for chat in chats:
        encoded = encoder.chat(chat)
        ids = torch.tensor([encoded.ids])
        chosen = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        counts = torch.tensor(encoded.counts[1:])
        nats -= float(chosen[counts].sum())
        tokens += int(counts.sum())
        grammar_nats += sum(turn.answer_nats for turn in chat.turns)
    return {
        "answer_tokens": tokens,
        "perplexity": round(math.exp(nats / tokens), 4),
        "grammar_perplexity": round(math.exp(grammar_nats / tokens), 4),
    }


def acceptance(prompts: Sequence[Prompt], answers: Sequence[str | None]) -> dict[str, object]:
    """Return counts of accepted answers, by subject and in all, and the rejected ones."""
    asked: Counter[str] = Counter(prompt.subject for prompt in prompts)
    accepted: Counter[str] = Counter()
    rejected = []
    for prompt, answer in zip(prompts, answers, strict=True):
        verdict = check(prompt.messages, answer or "")
        if answer is not None and verdict.accepted:
            accepted[prompt.subject] += 1
        else:
            explained = verdict.explained[-40:]
            rejected.append({"prompt": prompt.messages[-1]["content"], "answer": answer, "explained_until": explained})
    return {
        "answers": len(prompts),
        "accepted": accepted.total(),
        "accepted_percent": round(100 * accepted.total() / len(prompts), 1),
        "without_end": sum(answer is None for answer in answers),
        "by_subject": {subject: f"{accepted[subject]}/{count}" for subject, count in asked.items()},
        "rejected": rejected,
    }


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 of the weights, by which results are known to be theirs."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def evaluate(folder: Path, training: dict[str, float]) -> dict[str, object]:
    """Return everything that is measured about a model folder; `training` is its training.json."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = held_out_prompts(SEED)
    trained_on = islice(conversations(int(training["seed"])), int(training["conversations"]))
    compared = assert_disjoint(prompts, trained_on)
    chats = grammar.sample_conversations(SEED + 1, 400, held_out=True)
    torch.manual_seed(SEED)
    answers = sample(model, tokenizer, [prompt.messages for prompt in prompts])
    return {
        "weights_sha256": weights_digest(folder),
        "seed": SEED,
        "temperature": model.generation_config.temperature,
        "training_conversations_compared": compared,
        "held_out": perplexity(model, tokenizer, chats),
        "acceptance": acceptance(prompts, answers),
    }


def main() -> None:
    """Measure and write evaluation.json."""
    parser = argparse.ArgumentParser(description="evaluate the demo model")
    parser.add_argument("--model", type=Path, default=Path("demo_model/model"))
    parser.add_argument(
        "--results", type=Path, default=Path("tools/demo_model/results"), help="folder with training.json"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    training = json.loads((arguments.results / "training.json").read_text())
    found = evaluate(arguments.model, training)
    (arguments.results / "evaluation.json").write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.write(json.dumps({**found, "acceptance": _headline(found)}, indent=2) + "\n")


def _headline(found: dict[str, object]) -> object:
    accepted = found["acceptance"]
    assert isinstance(accepted, dict)
    return {key: value for key, value in accepted.items() if key != "rejected"}


if __name__ == "__main__":
    main()
