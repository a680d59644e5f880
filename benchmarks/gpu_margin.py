"""Greedy answers of a whole running system against transformers on the same device: how often and how far they differ.

    python -m benchmarks.gpu_margin DIR [--shape llama3-8b] [--device cuda] [--dtype bfloat16] [--memory 40GiB]
                                    [--requests 32] [--tokens 128] [--prompt 700]

`sluice up` serves a random checkpoint (made in DIR, if it has none) with one worker; all requests run side by side,
with prompts of up to so many tokens. When it has ended, transformers computes the logits of each prompt with its answer
in one pass. A token is a flip if transformers' largest logit is another one; its margin is how much larger that is. In
bfloat16 a logit of 8 has steps of 1/16, so margins of a few steps are rounding; large ones are faults.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from benchmarks.harness import print_table
from benchmarks.peers_engines import EngineProcess
from benchmarks.peers_model import FIRST_ID, NUM_TOKENS, SHAPES, make_checkpoint, silent_ids

ANSWER_LIMIT_S = 1800.0
LARGE_MARGIN = 0.5


async def answers_of(flags: list[str], prompts: list[list[int]], num_tokens: int, log: Path) -> list[list[str]]:
    """Return the answers' tokens, as the system says them."""
    cluster = EngineProcess()
    try:
        line = await cluster.up(*flags, log=log)
        timeout = aiohttp.ClientTimeout(total=ANSWER_LIMIT_S)
        async with aiohttp.ClientSession(line["url"], timeout=timeout) as http:

            async def ask(prompt: list[int]) -> list[str]:
                options: dict[str, Any] = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
                body = {"model": "model", "prompt": prompt, "logprobs": 0, **options}
                async with http.post("/v1/completions", json=body) as response:
                    answer = await response.json()
                    if response.status != 200:
                        raise RuntimeError(f"status {response.status}: {answer}")
                said: list[str] = answer["choices"][0]["logprobs"]["tokens"]
                return said

            return await asyncio.gather(*map(ask, prompts))
    finally:
        await cluster.stop()


def margins_of(model: Any, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return how much larger transformers' largest logit is than the one of each token [num_tokens]; 0: it is that."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
    ours = logits.gather(1, torch.tensor(answer, device=model.device)[:, None])
    margins: np.ndarray = (logits.amax(dim=1, keepdim=True) - ours).squeeze(1).cpu().numpy()
    return margins


def main() -> None:
    """Serve, compute again and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--memory", default="40GiB")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=700, help="tokens of the longest prompt")
    parser.add_argument("--flag", action="append", default=[], help="of sluice up, such as --flag=--no-graphs")
    arguments = parser.parse_args()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_checkpoint(arguments.shape, arguments.folder)
    vocab = AutoTokenizer.from_pretrained(arguments.folder).get_vocab()
    silent = set(silent_ids(vocab))
    ids = {said.replace("\u0120", " "): i for said, i in vocab.items() if i not in silent}
    random = np.random.default_rng(0)
    lengths = random.integers(1, arguments.prompt + 1, arguments.requests).tolist()
    prompts = [random.integers(FIRST_ID, NUM_TOKENS, length).tolist() for length in lengths]
    flags = ["--model", str(arguments.folder), "--served-model-name", "model", "--workers", "1"]
    flags += ["--device", arguments.device, "--dtype", arguments.dtype, "--memory", arguments.memory, *arguments.flag]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            said = asyncio.run(answers_of([*flags, "--log-dir", folder], prompts, arguments.tokens, log))
        except BaseException:  # whatever it was, an interruption too: the logs that say why go with the folder
            sys.stderr.write("".join(each.read_text()[-4000:] for each in Path(folder).iterdir() if each.is_file()))
            raise
    answers = [[ids[token] for token in answer] for answer in said]
    dtype = getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=dtype).to(arguments.device).eval()
    by_answer = [margins_of(model, *pair) for pair in zip(prompts, answers, strict=True)]
    margins = np.concatenate(by_answer)
    flips = margins[margins > 0]
    print_table(
        f"{arguments.shape}, {arguments.dtype} on {arguments.device}, torch {torch.__version__}",
        ("answers", "tokens", "flips", "answers with one", "median margin", "largest margin"),
        [
            (
                str(len(answers)),
                str(len(margins)),
                f"{len(flips)} ({len(flips) / len(margins):.2%})",
                str(sum(bool(each.any()) for each in by_answer)),
                f"{np.median(flips):.3f}" if len(flips) else "-",
                f"{flips.max():.3f}" if len(flips) else "-",
            )
        ],
    )
    if (margins > LARGE_MARGIN).any():
        sys.exit(f"{int((margins > LARGE_MARGIN).sum())} tokens are more than {LARGE_MARGIN} below the largest logit")


if __name__ == "__main__":
    main()
