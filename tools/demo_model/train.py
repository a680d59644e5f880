"""Trains the demo model from scratch on the CPU and writes it as a Hugging Face folder.

    python -m tools.demo_model.train --out demo_model/model

Everything follows from the seed, except for rounding that depends on the machine.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.demo_model.data import Rows, batches
from tools.demo_model.tokenizer import MAX_MODEL_TOKENS, save, train_on_grammar

TEMPERATURE = 0.7
"""Default of generation_config.json, and the temperature at which acceptance is measured."""

MAX_NEW_TOKENS = 400
"""Default of generation_config.json; the longest story of the grammar is well below."""


@dataclass(frozen=True)
class TrainingParams:
    """How to train.

    Attributes:
        seed: of weights and conversations.
        steps: optimiser steps; training time is proportional to them.
        batch_tokens: tokens per step, padding included.
        matrix_rate: Muon's learning rate after warm-up, for the layers' matrices; falls to 0 along a cosine.
        vector_rate: the same of AdamW, for norms and the embedding.
        warmup_steps: steps over which both rates rise.
        weight_decay: of the layers' matrices only.
        max_gradient_norm: gradients are scaled down to this norm.
    """

    seed: int = 20
    steps: int = 5600
    batch_tokens: int = 2176
    matrix_rate: float = 5e-3
    vector_rate: float = 3e-3
    warmup_steps: int = 100
    weight_decay: float = 0.1
    max_gradient_norm: float = 1.0

    def schedule(self, step: int) -> float:
        """Return by how much the rates of a step, counted from 0, are below their peak: from 0 to 1."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * done))


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained model in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=448,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_MODEL_TOKENS,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:  # what each layer adds starts small beside the embedding, whatever the depth
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    model.set_attn_implementation("eager")  # on the CPU a third faster to train than the fused kernel, with a mask
    return model


def loss_of(model: LlamaForCausalLM, rows: Rows) -> torch.Tensor:
    """Return the mean cross entropy of the tokens that count, in nats."""
    hidden = model.model(
        input_ids=rows.ids, position_ids=rows.positions, attention_mask=rows.attention_bias(), use_cache=False
    ).last_hidden_state
    counted = rows.targets != -100
    logits = model.lm_head(hidden[counted])
    return torch.nn.functional.cross_entropy(logits.float(), rows.targets[counted])


def optimizers_of(model: LlamaForCausalLM, params: TrainingParams) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the layers' matrices, which learn to copy in half of AdamW's steps, and AdamW for the rest."""
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    taken = {id(matrix) for matrix in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    return (
        torch.optim.Muon(
            matrices, lr=params.matrix_rate, weight_decay=params.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=params.vector_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


@dataclass
class Training:
    """What a training run did.

    Attributes:
        curve: (step, mean loss of the last ten steps in nats), every ten steps.
        conversations: how many conversations of the stream were used.
        counted_tokens: tokens whose prediction was in the loss.
        seconds: wall time.
        cpu_seconds: of all threads, which is what a busy machine does not distort.
    """

    curve: list[tuple[int, float]] = field(default_factory=list)
    conversations: int = 0
    counted_tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    params: TrainingParams,
    keep: Callable[[], None] = lambda: None,
) -> Training:
    """Train in place and return what was done; `keep` is called every 500 steps."""
    optimizers = optimizers_of(model, params)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, params.schedule) for optimizer in optimizers]
    stream = batches(tokenizer, params.seed, params.batch_tokens)
    done = Training()
    recent = 0.0
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    model.train()
    for step in range(params.steps):
        done.conversations, rows = next(stream)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), params.max_gradient_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        recent += loss.item()
        done.counted_tokens += int((rows.targets != -100).sum())
        done.seconds, done.cpu_seconds = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        if (step + 1) % 10 == 0:
            done.curve.append((step + 1, recent / 10))
            recent = 0.0
            _show(done.curve[-1], params, done.seconds)
        if (step + 1) % 500 == 0:
            keep()
    return done


def _show(point: tuple[int, float], params: TrainingParams, spent_s: float) -> None:
    step, loss = point
    left_s = spent_s / step * (params.steps - step)
    end = "\n" if step % 100 == 0 or step == params.steps else "\r"
    sys.stderr.write(f"step {step}/{params.steps}  loss {loss:.4f}  {spent_s:.0f} s, {left_s:.0f} s left {end}")
    sys.stderr.flush()


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors (bfloat16) and the tokenizer."""
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=TEMPERATURE,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    half = copy.deepcopy(model)
    torch.nn.Module.to(half, torch.bfloat16)
    half.save_pretrained(folder)
    save(tokenizer, folder)


def write_results(done: Training, model: LlamaForCausalLM, params: TrainingParams, folder: Path) -> None:
    """Write loss.csv (the curve) and training.json (how it was trained)."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "loss.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "loss_nats"])
        writer.writerows([step, f"{loss:.4f}"] for step, loss in done.curve)
    summary = {
        **asdict(params),
        "conversations": done.conversations,
        "counted_tokens": done.counted_tokens,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": round(done.seconds),
        "cpu_seconds": round(done.cpu_seconds),
        "threads": torch.get_num_threads(),
    }
    (folder / "training.json").write_text(json.dumps(summary, indent=2) + "\n")


def main() -> None:
    """Train and write the model, its loss curve and how it was trained."""
    parser = argparse.ArgumentParser(description="train the demo model")
    parser.add_argument("--out", type=Path, default=Path("demo_model/model"))
    parser.add_argument("--results", type=Path, default=Path("tools/demo_model/results"))
    parser.add_argument("--steps", type=int, default=TrainingParams.steps, help="optimiser steps")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    params = TrainingParams(steps=arguments.steps)
    tokenizer = train_on_grammar()
    model = build_model(tokenizer, params.seed)
    done = train(model, tokenizer, params, keep=lambda: save_model(model, tokenizer, arguments.out))
    save_model(model, tokenizer, arguments.out)
    write_results(done, model, params, arguments.results)


if __name__ == "__main__":
    main()
