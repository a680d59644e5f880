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
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model import grammar
from tools.demo_model.checker import Verdict, check
from tools.demo_model.data import Encoder, conversations, render_prompt
from tools.demo_model.forms import bind_adder
from tools.demo_model.grammar import Conversation, Exchange, Grammar, Turn

SEED = 77
"""Of the held-out prompts and of the sampling."""


@dataclass(frozen=True)
class Subject:
    """What is asked.

    Attributes:
        name: its row in the results.
        count: how often.
        exchanges: kinds of turn that answer it, in turn.
        before: the turn before, if any.
        has_tools: the request brings tools, `add` among them.
        thinking: it is asked for.
        is_form: one of those that came later; their share is given apart.
    """

    name: str
    count: int
    exchanges: Sequence[Exchange]
    before: Sequence[Exchange] = ()
    has_tools: bool = False
    thinking: bool = False
    is_form: bool = False


_STORY = [grammar.FULL_STORY_EXCHANGE]
_OTHERS = [*grammar.FACTS, *grammar.COMPANY, grammar.FOREIGN_EXCHANGE, grammar.FULL_STORY_EXCHANGE]

PLAN = (
    Subject("stories", 320, _STORY),
    Subject("questions about a story", 70, grammar.ABOUT_STORY, before=_STORY),
    Subject("another story", 30, [grammar.ANOTHER_EXCHANGE], before=_STORY),
    Subject("facts", 60, grammar.FACTS),
    Subject("sums", 40, grammar.SUMS),
    Subject("company", 12, grammar.COMPANY),
    Subject("unknown subjects", 60, [grammar.FOREIGN_EXCHANGE]),
    Subject("calls for a sum", 60, grammar.CALLS, has_tools=True, is_form=True),
    Subject("results of a call", 60, grammar.RESULTS, before=grammar.CALLS, has_tools=True, is_form=True),
    Subject("other questions beside tools", 60, _OTHERS, has_tools=True, is_form=True),
    Subject("told stories as JSON", 60, [grammar.TOLD_AS_JSON], before=_STORY, is_form=True),
    Subject("new stories as JSON", 60, grammar.NEW_AS_JSON[:1], is_form=True),
    Subject("thoughts before sums", 60, grammar.SUMS, thinking=True, is_form=True),
    Subject("thoughts before other answers", 60, _OTHERS, thinking=True, is_form=True),
)
"""What is asked; all the prompts of a subject are different."""


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt.

    Attributes:
        subject: which of the plan.
        chat: as the grammar writes it; its last answer is not shown to the model.
    """

    subject: Subject
    chat: Conversation

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat without the answer to be sampled."""
        return self.chat.messages[:-1]

    def accepts(self, answer: str | None) -> Verdict:
        """Return what the checker says of an answer; None has no end."""
        verdict = check(self.messages, answer or "", tools=self.chat.tools, thinking=self.chat.is_thinking)
        return replace(verdict, accepted=verdict.accepted and answer is not None)


def held_out_prompts(seed: int) -> list[Prompt]:
    """Return the prompts of the plan, all different."""
    writer = Grammar(seed, held_out=True)
    found: dict[str, Prompt] = {}
    for subject in PLAN:
        wanted = len(found) + subject.count
        index = 0
        while len(found) < wanted:
            index += 1
            assert index < 100 * subject.count, f"too few different prompts: {subject.name}"
            prompt = Prompt(subject, _chat(writer, subject, index))
            identity = (prompt.messages, prompt.chat.tools, prompt.chat.is_thinking)
            found.setdefault(json.dumps(identity).lower(), prompt)
    return list(found.values())


def _chat(writer: Grammar, subject: Subject, index: int) -> Conversation:
    tools = writer.tools() if subject.has_tools else ()
    env = bind_adder(tools)
    turns: list[Turn] = []
    if subject.before:
        turns.append(writer.turn(subject.before[index % len(subject.before)], env))
        env = turns[-1].env
    exchange = subject.exchanges[index // max(1, len(subject.before)) % len(subject.exchanges)]
    turns.append(writer.turn(exchange, env, thinking=subject.thinking))
    return Conversation("", tuple(turns), tools)


def assert_disjoint(prompts: Iterable[Prompt], training: Iterable[Conversation]) -> int:
    """Return the number of training conversations after comparing all of them with the prompts.

    Raises:
        AssertionError: a story's combination of kind, place and wish, or a prompt about anything else, was trained on.
    """
    turns = [turn for prompt in prompts for turn in prompt.chat.turns if not turn.exchange.is_decided]
    asked = {turn.prompt.lower() for turn in turns if _triple(turn) is None}
    combinations = {triple for turn in turns if (triple := _triple(turn))}
    count = 0
    for conversation in training:
        count += 1
        for turn in (turn for turn in conversation.turns if not turn.exchange.is_decided):
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
    chats: Sequence[Conversation],
    batch_size: int = 64,
) -> list[str | None]:
    """Return one sampled answer in place of each chat's last, with the model's own defaults; None: it has no end.

    Temperature and the limit of tokens are those of generation_config.json; nothing else narrows the choice.
    """
    answers: list[str | None] = []
    for start in range(0, len(chats), batch_size):
        texts = [render_prompt(tokenizer, chat) for chat in chats[start : start + batch_size]]
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
        grammar_nats += sum(turn.said_nats for turn in chat.turns)
    return {
        "answer_tokens": tokens,
        "perplexity": round(math.exp(nats / tokens), 4),
        "grammar_perplexity": round(math.exp(grammar_nats / tokens), 4),
    }


def acceptance(prompts: Sequence[Prompt], answers: Sequence[str | None]) -> dict[str, object]:
    """Return how many answers to the whole plan are accepted, by subject and of the forms apart, and the others."""
    accepted: Counter[str] = Counter()
    rejected = []
    for prompt, answer in zip(prompts, answers, strict=True):
        verdict = prompt.accepts(answer)
        if verdict.accepted:
            accepted[prompt.subject.name] += 1
        else:
            said = {"subject": prompt.subject.name, "prompt": prompt.messages[-1]["content"], "answer": answer}
            rejected.append({**said, "explained_until": verdict.explained[-40:]})
    return {
        "answers": len(prompts),
        "accepted": accepted.total(),
        "accepted_percent": _percent(accepted, forms=False),
        "accepted_percent_of_forms": _percent(accepted, forms=True),
        "without_end": sum(answer is None for answer in answers),
        "by_subject": {subject.name: f"{accepted[subject.name]}/{subject.count}" for subject in PLAN},
        "rejected": rejected,
    }


def _percent(accepted: Counter[str], *, forms: bool) -> float:
    subjects = [subject for subject in PLAN if subject.is_form == forms]
    asked = sum(subject.count for subject in subjects)
    return round(100 * sum(accepted[subject.name] for subject in subjects) / asked, 1)


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
    answers = sample(model, tokenizer, [prompt.chat for prompt in prompts])
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
