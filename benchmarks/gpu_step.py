"""How near decodes come to a device's memory bandwidth, and prompts to its matrix multiplication.

    python -m benchmarks.gpu_step --model FOLDER [--device cuda] [--dtype bfloat16] [--memory-gib 60] [--context 1024]
                                  [--no-graphs] [--no-fused] [--transformers] [--profile llama-3-8b-tp1-h200]

Both roofs are measured first, by torch on the same device: a copy within its memory (bytes read and written per second)
and a product of square matrices. A step of decodes reads all parameters but the embedding, and the KV of its contexts;
a prompt multiplies each of its tokens with all parameters of the layers, and attends what is before it. Steps are run
as the worker runs them, up to the tokens that come back; the median counts. Sizes that the memory does not hold are
left out, and said so. With `--transformers` the same steps are run by transformers, with its attention by torch and KV
that grows. With `--profile` stands what the cost model says of the same steps on that profile's GPU. On the CPU
(`--device cpu`) it does the same, for trying it out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import print_table
from benchmarks.on_device import model_parser, name_of, parse, seconds, settings_of
from benchmarks.step_profile import make_batch
from services.worker.executor.model_runner import ModelRunner
from services.worker.executor.runner import load_model
from services.worker.memory.measure import release_free_memory
from services.worker.models.spec import ModelSpec
from shared.cost import CostModel, load_profile, prefill_pairs

DECODES = (1, 16, 64, 256)
PROMPTS = (512, 1024, 2048, 4096, 8192)
COPY_BYTES, MATRIX = {"cuda": 2 * 2**30, "cpu": 64 * 2**20}, {"cuda": 8192, "cpu": 1024}
"""By kind of device: bytes that are copied, and the side of a matrix."""


def copy_roof(device: torch.device, rounds: int) -> float:
    """Return the bytes per second that a copy within the device's memory reads and writes."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(device, lambda: target.copy_(source), rounds)


def product_roof(device: torch.device, dtype: torch.dtype, rounds: int) -> float:
    """Return the operations per second of a product of square matrices, a multiplication and an addition being two."""
    side = MATRIX[device.type]
    left, right = (torch.randn((side, side), device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / seconds(device, lambda: left @ right, rounds)


def decode_bytes(runner: ModelRunner, spec: ModelSpec, item_bytes: int, num_rows: int, context: int) -> int:
    """Return what a step of decodes has to read: parameters, without an embedding of its own, and KV."""
    embedding = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    kv = runner.info.bytes_per_block // runner.capacity.block_size * context * num_rows
    return (runner.info.num_parameters - embedding) * item_bytes + kv


def prompt_operations(runner: ModelRunner, spec: ModelSpec, num_tokens: int) -> int:
    """Return the operations that a prompt takes; the head is applied to its last token."""
    head = spec.vocab_size * spec.hidden_size
    layers = runner.info.num_parameters - (head if spec.tied_embeddings else 2 * head)
    attention = 2 * num_tokens**2 * spec.num_heads * spec.head_dim * spec.num_layers  # half of all pairs, twice
    return 2 * layers * num_tokens + attention + 2 * head


def main() -> None:
    """Measure and print."""
    parser = model_parser(__doc__)
    parser.add_argument("--transformers", action="store_true", help="time transformers too, in the same run")
    parser.add_argument("--profile", help="of the cost model, by name, to be held against")
    parser.add_argument("--context", type=int, default=1024, help="tokens before each decoded one")
    parser.add_argument("--steps", type=int, default=30, help="of each kind")
    arguments, device = parse(parser)
    dtype = getattr(torch, arguments.dtype)
    profile = None if arguments.profile is None else load_profile(arguments.profile)
    bandwidth = copy_roof(device, arguments.steps)
    operations = product_roof(device, dtype, arguments.steps)
    settings = settings_of(arguments, max_batch_rows=max(DECODES), max_batch_tokens=max(PROMPTS))
    loaded = load_model(settings, lambda _done, what: print(f"# {what}", flush=True))
    runner, spec = loaded.runner, loaded.opener.spec
    where = name_of(device)
    print(f"\n{where}; torch {torch.__version__}; {runner.info.kernels}, {arguments.dtype}")
    print(f"Roofs: {bandwidth / 1e9:.0f} GB/s copied, {operations / 1e12:.2f} Tflop/s multiplied")
    decodes = {size: (size, 1, arguments.context) for size in DECODES}
    prompts = {size: (1, size, 0) for size in PROMPTS}

    def taken_s(num_rows: int, num_tokens: int, start: int) -> float | None:
        return step_s(runner, device, num_rows, num_tokens, start, arguments.steps)

    def read_s(num_rows: int) -> float:
        return decode_bytes(runner, spec, dtype.itemsize, num_rows, arguments.context) / bandwidth

    tables = [
        rows_of(taken_s, decodes, read_s),
        rows_of(taken_s, prompts, lambda size: prompt_operations(runner, spec, size) / operations),
    ]
    if arguments.transformers:
        runner.close()
        del loaded, runner  # the reference needs their memory
        release_free_memory(device)
        reference = Reference(arguments.model, device, dtype)
        for rows, shapes in zip(tables, (decodes, prompts), strict=True):
            for index, shape in enumerate(shapes.values()):
                taken = reference.step_s(*shape, arguments.steps)
                rows[index] = (*rows[index], "does not fit" if taken is None else f"{taken * 1e3:.2f}")
    others = ["transformers, ms"] if arguments.transformers else []
    if profile is not None:
        others.append(f"{profile.model} on {profile.gpu} by the cost model, ms")
        add_model(profile.cost, arguments.context, *tables)
    header = ("ms per step", "tokens/s", "of the roof", *others)
    print_table(f"Decodes, {arguments.context} tokens before each", ("rows", *header), tables[0])
    print_table("Prompts", ("tokens", *header), tables[1])


def rows_of(
    taken_s: Callable[[int, int, int], float | None],
    shapes: dict[int, tuple[int, int, int]],
    least_s: Callable[[int], float],
) -> list[tuple[str, ...]]:
    """Return the rows of one table.

    Args:
        taken_s: time of a step of so many rows, tokens of each, and tokens before them; None: the memory lacks room.
        shapes: of the steps, by what they are called.
        least_s: time that such a step would take at the roof.
    """
    rows: list[tuple[str, ...]] = []
    for size, shape in shapes.items():
        taken = taken_s(*shape)
        if taken is None:
            rows.append((str(size), "does not fit", "", ""))
        else:
            rows.append((str(size), f"{taken * 1e3:.2f}", f"{size / taken:.0f}", f"{least_s(size) / taken:.0%}"))
    return rows


def add_model(cost: CostModel, context: int, decodes: list[tuple[str, ...]], prompts: list[tuple[str, ...]]) -> None:
    """Put what a cost model says of the same steps behind what was measured."""
    for index, size in enumerate(DECODES):
        decodes[index] = (*decodes[index], f"{cost.step_s(size, size * context, 0) * 1e3:.2f}")
    for index, size in enumerate(PROMPTS):
        prompts[index] = (*prompts[index], f"{cost.step_s(size, 0, prefill_pairs(0, size)) * 1e3:.2f}")


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self._model = model.to(device).eval()
        self._device = device

    def step_s(self, num_rows: int, num_tokens: int, start: int, num_steps: int) -> float | None:
        """Return the median time of a step, as `step_s`; None: the memory does not hold it."""
        try:
            with torch.inference_mode():
                cache = self._forward(num_rows, start, None).past_key_values if start else None

                def step() -> None:
                    nonlocal cache
                    said = self._forward(num_rows, num_tokens, cache)
                    cache = said.past_key_values if start else None
                    said.logits.argmax(-1).cpu()

                return seconds(self._device, step, num_steps)
        except torch.cuda.OutOfMemoryError:
            return None

    def _forward(self, num_rows: int, num_tokens: int, cache: Any) -> Any:
        tokens = torch.full((num_rows, num_tokens), 5, device=self._device)
        return self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)


def step_s(
    runner: ModelRunner, device: torch.device, num_rows: int, num_tokens: int, start: int, num_steps: int
) -> float | None:
    """Return the median time of a step, in seconds; None: the memory does not hold it, or the model not its length."""
    block_size = runner.capacity.block_size
    if num_rows * -(-(start + num_tokens) // block_size) > runner.capacity.num_blocks:
        return None
    if start + num_tokens > runner.info.max_model_len:
        return None
    runner.run(make_batch(runner, num_rows, num_tokens, start, is_first=True))
    batch = make_batch(runner, num_rows, num_tokens, start, is_first=False)
    return seconds(device, lambda: runner.run(batch), num_steps)


if __name__ == "__main__":
    main()
