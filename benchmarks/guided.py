"""What it costs to hold answers to grammars, over a vocabulary of 151 643 pieces.

    python -m benchmarks.guided masks [--rows 1,64,256] [--tokens 120]
    python -m benchmarks.guided steps --folder DIR [--rows 64] [--steps 12] [--rounds 5]
    python -m benchmarks.guided served --folder DIR --vllm-python PYTHON [--batches 1,32] [--rounds 3]

`masks`: how long grammars take to compile, and how long a step waits for its masks if nothing hides them: what is
before the forward pass and beside it (follow a token per row, make the masks), and what is behind (exclude). Rows go
through answers that their schemas allow, each of another schema, in the longest pieces that are allowed.

`steps`: the time of a decode step of a model in which none, one, or all rows are guided, by turns in one run, and the
ratios to none. DIR is made by `python -m benchmarks.peers_model qwen2-0.5b DIR`; the tokenizer is this one's.

`served`: output tokens per second of guided answers over HTTP, and the ratio to free ones, by this server and by vLLM
with its default backend, by turns in one run; `small` of `peers_model` is in DIR, and its own tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.harness import machine, print_table
from benchmarks.peers import draw_prompts
from benchmarks.peers_engines import Setting
from benchmarks.peers_load import wait_idle
from benchmarks.peers_servers import SluiceServer, VllmServer
from services.worker.contract.arrays import EMPTY_I32
from services.worker.contract.batch import Batch, RowInit
from services.worker.contract.executor import BatchFailedError
from services.worker.engine.engine import Engine
from services.worker.executor.first_look import RunnerSettings
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.runner import load_runner
from services.worker.sampling.grammar_cache import GrammarCache
from services.worker.sampling.guides import Guides
from services.worker.scheduling.registry import make_scheduler
from services.worker.sequences.config import AddRefusal, EngineConfig, NewSequence
from shared.grammars import GrammarCompiler
from shared.ids import RequestId, StreamId
from shared.types import SamplingParams

NUM_PIECES: Final = 151_643
VOCAB: Final = 151_936
"""Rows of the embedding: some have no piece."""
END_ID: Final = NUM_PIECES
NUM_SCHEMAS: Final = 64
PROMPT: Final = 32
NUM_SERVED: Final = 192
"""Output tokens of each answer."""
LONG_TEXT: Final = r'\{"name": "[a-z ]{3,12}", "kind": "(fox|hare|mole)", "text": "[a-z ,.]+~{300}"\}'
"""What is said in its text has no end before the answer has."""
GUIDED: Final = (0, 1, None)
"""Rows of a step that are guided; None: all."""


def make_tokenizer() -> Tokenizer:
    """Return a byte-level BPE whose pieces are made at random: words, numbers and what stands in JSON."""
    rng = random.Random(0)
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges, pieces, letters = [], list(vocab), string.ascii_lowercase
    while len(vocab) < NUM_PIECES:
        left = rng.choice(pieces) if rng.random() < 0.7 else rng.choice(letters)
        right = rng.choice(letters + 'ĠĠ{}":,' + string.digits)
        if len(left) < 12 and left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
            pieces.append(left + right)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def make_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema such as tools and extractions have: objects of texts, numbers, choices, lists and objects."""
    members: dict[str, Any] = {}
    for _ in range(rng.randint(2, 6)):
        name = "_".join("".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 7))) for _ in range(2))
        kinds: list[Callable[[], dict[str, Any]]] = [
            lambda: {"type": "string", "maxLength": 40},
            lambda: {"type": "integer"},
            lambda: {"type": "number", "minimum": 0},
            lambda: {"type": "boolean"},
            lambda: {"enum": ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(12)]},
            lambda: {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 6},
            lambda: {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
        ]
        members[name] = make_schema(rng, depth + 1) if depth < 2 and rng.random() < 0.2 else rng.choice(kinds)()
    return {"type": "object", "properties": members, "required": list(members), "additionalProperties": False}


def make_instance(rng: random.Random, schema: dict[str, Any]) -> Any:
    """Return what a schema of `make_schema` allows."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema["type"]:
        case "object":
            return {name: make_instance(rng, member) for name, member in schema["properties"].items()}
        case "array":
            return [make_instance(rng, schema["items"]) for _ in range(rng.randint(0, 6))]
        case "string" if "pattern" in schema:
            return f"{rng.randint(1000, 9999)}-{rng.randint(10, 12)}-{rng.randint(10, 28)}"
        case "string":
            words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 8))) for _ in range(6)]
            return " ".join(words)[: schema["maxLength"]]
        case "boolean":
            return rng.random() < 0.5
    return rng.randint(0, 10_000)


@dataclass(frozen=True, slots=True)
class Answer:
    """A grammar, and a text that it allows."""

    grammar: bytes
    text: str


def answers() -> list[Answer]:
    """Return one of each schema."""
    rng = random.Random(1)
    schemas = [make_schema(rng) for _ in range(NUM_SCHEMAS)]
    return [
        Answer(LLMatcher.grammar_from_json_schema(json.dumps(schema)).encode(), json.dumps(make_instance(rng, schema)))
        for schema in schemas
    ]


def compile_times(compiler: GrammarCompiler) -> list[float]:
    """Return the seconds that each grammar takes."""
    taken = []
    for answer in answers() * 3:
        began_s = time.perf_counter()
        compiler.compile(answer.grammar)
        taken.append(time.perf_counter() - began_s)
    return taken


class Rows:
    """Guided rows that go through answers; who comes to an end begins with another one.

    Args:
        num_rows: of them.
        cache: of their grammars.
        pieces: ids by their texts.
    """

    def __init__(self, num_rows: int, cache: GrammarCache, pieces: dict[str, int]) -> None:
        self._guides = Guides(num_rows, (END_ID,), VOCAB, cache)
        self._rows = np.arange(num_rows, dtype=np.int32)
        self._answers = answers()
        self._pieces = pieces
        self._left = [""] * num_rows
        self._lengths = np.ones(num_rows, dtype=np.int32)
        self._next = np.full(num_rows, 5, dtype=np.int32)
        self._new = list(range(num_rows))
        self._num_begun = 0

    def step(self, logits: torch.Tensor) -> tuple[float, float]:
        """Return the seconds of what is beside a forward pass, and behind it; the logits are [num_rows, vocabulary]."""
        batch = self._batch()
        began_s = time.perf_counter()
        self._guides.take_in(batch)
        self._guides.prepare(self._rows)
        assert self._guides._asked is not None  # noqa: SLF001  whoever computes meanwhile does not wait
        self._guides._asked.result()  # noqa: SLF001
        made_s = time.perf_counter()
        self._guides.apply(logits, may_undo=False)
        done_s = time.perf_counter()
        for row, of_row in enumerate(logits):
            self._next[row] = self._take(row, of_row)
        self._lengths += 1
        self._new = np.flatnonzero(self._next == END_ID).tolist()
        self._lengths[self._new] = 1
        return made_s - began_s, done_s - made_s

    def _take(self, row: int, logits: torch.Tensor) -> int:
        left = self._left[row]
        for length in range(min(12, len(left)), 0, -1):
            token_id = self._pieces.get(left[:length].replace(" ", "Ġ"))
            if token_id is not None and logits[token_id] > -torch.inf:
                self._left[row] = left[length:]
                return token_id
        assert not left, f"{left!r} is not allowed"
        return END_ID

    def _batch(self) -> Batch:
        inits = []
        for row in self._new:
            answer = self._answers[self._num_begun % NUM_SCHEMAS]
            self._num_begun += 1
            self._left[row] = answer.text
            sampling = SamplingParams(max_tokens=9999, grammar=answer.grammar)
            inits.append(RowInit(row, sampling, 1, np.full(1, 5, dtype=np.int32)))
        ones = np.ones(len(self._rows), dtype=np.int32)
        sample = np.ones(len(self._rows), dtype=np.bool_)
        return Batch(
            0, self._rows, ones, self._lengths - 1, self._next.copy(), sample, admits=tuple(inits), drops=EMPTY_I32
        )


def measure_masks(row_counts: list[int], num_tokens: int) -> None:
    """Print how long grammars and masks take."""
    tokenizer = make_tokenizer()
    began_s = time.perf_counter()
    compiler = GrammarCompiler(tokenizer.to_str(), VOCAB, [END_ID])
    print(f"vocabulary read in {time.perf_counter() - began_s:.1f} s")
    taken = np.array(compile_times(compiler)) * 1e3
    print(f"compile, ms: p50 {np.median(taken):.2f}, p99 {np.percentile(taken, 99):.2f}, {NUM_SCHEMAS} schemas")
    cache, pieces, lines = GrammarCache(compiler), tokenizer.get_vocab(), []
    for answer in answers():
        cache.prepare(answer.grammar)
    for count in row_counts:
        rows, logits = Rows(count, cache, pieces), torch.randn(count, VOCAB)
        times = np.array([rows.step(logits.clone()) for _ in range(num_tokens)]) * 1e3
        both = times.sum(axis=1)
        figures = [*np.percentile(times[:, 0], [50, 99]), *np.percentile(times[:, 1], [50, 99])]
        lines.append([str(count), *(f"{figure:.2f}" for figure in [*figures, *np.percentile(both, [50, 99])])])
    head = ["guided rows", "beside p50", "beside p99", "behind p50", "behind p99", "both p50", "both p99"]
    print_table("Masks of a step, ms", head, lines)


def open_runner(folder: Path, num_rows: int) -> ModelRunner:
    """Return a runner over the model with this vocabulary."""
    with tempfile.TemporaryDirectory() as temporary:
        beside = Path(temporary)
        for file in folder.iterdir():
            if not file.name.startswith("tokenizer"):
                (beside / file.name).symlink_to(file.resolve())
        make_tokenizer().save(str(beside / "tokenizer.json"))
        settings = RunnerSettings(
            beside,
            memory_bytes=3500 * 2**20,
            max_batch_rows=num_rows,
            max_batch_tokens=max(num_rows, 256),
            max_rows=num_rows,
            max_model_len=512,
        )
        return load_runner(settings, lambda _done, _what: None)


def decode_steps(runner: ModelRunner, samplings: list[SamplingParams], num_steps: int) -> Iterator[float]:
    """Yield the seconds of decode steps of so many rows."""
    info = runner.info
    config = EngineConfig(
        max_sequences=len(samplings),
        max_batch_tokens=info.max_batch_tokens,
        max_batch_rows=len(samplings),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=(END_ID,),
        block_size=info.capacity.block_size,
    )
    engine = Engine(config, make_scheduler("chunked"), info.capacity.num_blocks)
    for i, sampling in enumerate(samplings):
        prompt = np.arange(3 + i, 3 + i + PROMPT, dtype=np.uint32)
        new = NewSequence(RequestId(f"r{i}"), StreamId(i), 1, 0, prompt, sampling, 0.0, 1e9)
        assert not isinstance(engine.registry.add(new), AddRefusal)
    while num_steps:
        batch = engine.next_batch(0.0)
        assert batch is not None, "the answers are too short"
        began_s = time.perf_counter()
        try:
            output = runner.run(batch)
        except BatchFailedError as error:
            raise AssertionError(error.cause) from error
        took_s = time.perf_counter() - began_s
        engine.absorb(batch, output, 0.0)
        if len(batch.rows) == len(samplings) and int(batch.num_tokens.max()) == 1:
            num_steps -= 1
            yield took_s


def measure_steps(folder: Path, num_rows: int, num_steps: int, num_rounds: int) -> None:
    """Print how long steps take."""
    schema = {"type": "array", "items": make_schema(random.Random(2)), "minItems": 400}
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema)).encode()
    runner = open_runner(folder, num_rows)
    medians = np.zeros((num_rounds, len(GUIDED)))
    for turn in range(num_rounds):
        for place in np.roll(np.arange(len(GUIDED)), turn).tolist():
            wanted = GUIDED[place]
            num_guided = num_rows if wanted is None else wanted
            samplings = [
                SamplingParams(max_tokens=400, seed=i, ignore_eos=True, grammar=grammar if i < num_guided else b"")
                for i in range(num_rows)
            ]
            medians[turn, place] = np.median(list(decode_steps(runner, samplings, num_steps))[2:])
            print(f"round {turn + 1} of {num_rounds}: {num_guided} of {num_rows} rows guided", flush=True)
    runner.close()
    ratios = np.median(medians / medians[:, :1], axis=0)
    lines = [
        ["all" if count is None else str(count), f"{np.median(medians[:, i]) * 1e3:.1f}", f"{ratios[i]:.3f}"]
        for i, count in enumerate(GUIDED)
    ]
    print_table(f"Step of {num_rows} decodes", ["guided", "ms", "ratio"], lines)


async def measure_served(folder: Path, vllm_python: str, batches: list[int], num_rounds: int) -> None:
    """Print what the two servers give."""
    engines: list[SluiceServer | VllmServer] = [SluiceServer(folder), VllmServer(vllm_python, folder)]
    setting = Setting(
        checkpoint=folder / "small",
        dtype="float32",
        threads=2,
        max_len=PROMPT + NUM_SERVED + 256,
        memory="2GiB",
        kv_gib=2,
        num_output=NUM_SERVED,
    )
    ways: dict[str, dict[str, Any]] = {"free": {}, "guided": {"structured_outputs": {"regex": LONG_TEXT}}}
    found: dict[tuple[str, int, str], list[float]] = {}
    rng = np.random.default_rng(1)
    try:
        for engine in engines:
            await engine.start(setting)
        for turn in range(num_rounds + 1):  # the first one warms up
            for batch in batches:
                prompts = draw_prompts(rng, batch, PROMPT)
                for engine in engines[:: 1 - 2 * (turn % 2)]:
                    for way, engine.more in ways.items():
                        await wait_idle()
                        figures = await engine.run(prompts)
                        print(f"round {turn}: {engine.name}, {batch} at once, {way}: {figures.tokens_per_s:.0f}/s")
                        if turn:
                            found.setdefault((engine.name, batch, way), []).append(figures.tokens_per_s)
    finally:
        for engine in engines:
            await engine.stop()
    lines = [
        [
            engine.name,
            str(batch),
            *(f"{np.median(found[engine.name, batch, way]):.0f}" for way in ways),
            f"{np.median(np.divide(found[engine.name, batch, 'guided'], found[engine.name, batch, 'free'])):.2f}",
        ]
        for engine in engines
        for batch in batches
    ]
    print_table("Output tokens per second", ["server", "at once", *ways, "guided / free"], lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    masks = kinds.add_parser("masks")
    masks.add_argument("--rows", default="1,64,256")
    masks.add_argument("--tokens", type=int, default=120, help="steps of each")
    steps = kinds.add_parser("steps")
    steps.add_argument("--folder", type=Path, required=True)
    steps.add_argument("--rows", type=int, default=64)
    steps.add_argument("--steps", type=int, default=12)
    steps.add_argument("--rounds", type=int, default=5)
    served = kinds.add_parser("served")
    served.add_argument("--folder", type=Path, required=True)
    served.add_argument("--vllm-python", required=True)
    served.add_argument("--batches", default="1,32")
    served.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    print(machine())
    if chosen.kind == "masks":
        measure_masks([int(count) for count in chosen.rows.split(",")], chosen.tokens)
    elif chosen.kind == "served":
        batches = [int(count) for count in chosen.batches.split(",")]
        asyncio.run(measure_served(chosen.folder, chosen.vllm_python, batches, chosen.rounds))
    else:
        measure_steps(chosen.folder, chosen.rows, chosen.steps, chosen.rounds)


if __name__ == "__main__":
    main()
