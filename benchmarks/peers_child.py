"""vLLM offline and transformers as child processes of `benchmarks.peers`, each in a Python environment of its own.

A script by itself: it imports nothing of this project. Commands come as lines of JSON on stdin,
{"prompts": [[id, …], …], "num_output": n}; each is answered by a line of JSON, {"tokens_per_s", "ttft_s", "itl_s"}; the
first line says that it is ready. Whatever libraries print goes to stderr.

    python benchmarks/peers_child.py vllm|hf CHECKPOINT float32|bfloat16 THREADS MAX_LEN
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[list[list[int]], int], dict[str, float]]


def load_hf(checkpoint: str, dtype: str, threads: int, _max_len: int) -> Run:
    """Return what generates with `transformers`: one static batch, greedy, scaled dot product attention."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], num_output: int) -> float:
        ids = torch.tensor(prompts)
        began_s = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_output,
                min_new_tokens=num_output,
                eos_token_id=None,
                pad_token_id=2,
            )
        elapsed_s = time.perf_counter() - began_s
        assert found.shape[1] == ids.shape[1] + num_output, "an answer ended early"
        return elapsed_s

    def run(prompts: list[list[int]], num_output: int) -> dict[str, float]:
        ttft_s = generate(prompts, 1)
        elapsed_s = generate(prompts, num_output)
        return {
            "tokens_per_s": len(prompts) * num_output / elapsed_s,
            "ttft_s": ttft_s,
            "itl_s": (elapsed_s - ttft_s) / max(num_output - 1, 1),
        }

    return run


def load_vllm(checkpoint: str, dtype: str, _threads: int, max_len: int) -> Run:
    """Return what generates with vLLM's `LLM`; threads are bound by its own environment variables."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        checkpoint,
        dtype=dtype,
        max_model_len=max_len,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )

    def run(prompts: list[list[int]], num_output: int) -> dict[str, float]:
        sampling = SamplingParams(
            temperature=0, max_tokens=num_output, min_tokens=num_output, ignore_eos=True, detokenize=False
        )
        began_s = time.perf_counter()
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        elapsed_s = time.perf_counter() - began_s
        metrics = [answer.metrics for answer in answers]
        gaps = [(m.last_token_ts - m.first_token_ts) / max(num_output - 1, 1) for m in metrics]
        return {
            "tokens_per_s": sum(len(answer.outputs[0].token_ids) for answer in answers) / elapsed_s,
            "ttft_s": sum(m.first_token_latency for m in metrics) / len(metrics),
            "itl_s": sum(gaps) / len(gaps),
        }

    return run


def serve(load: Callable[[], Run]) -> None:
    """Answer commands until stdin ends; what libraries print to stdout is sent to stderr instead."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(fields: dict[str, Any]) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    run = load()
    answer({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        answer(run(command["prompts"], command["num_output"]))


if __name__ == "__main__":
    kind, folder, number_type, num_threads, longest = sys.argv[1:]
    loader = {"hf": load_hf, "vllm": load_vllm}[kind]
    serve(lambda: loader(folder, number_type, int(num_threads), int(longest)))
