"""The servers among the engines of `benchmarks.peers`, each with the client of `sluice bench` on the same cores."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness import free_port
from benchmarks.peers_engines import RUN_LIMIT_S, START_LIMIT_S, EngineProcess, Figures, Setting, vllm_env
from cli.bench.load import BenchLoad
from cli.bench.report import summarise
from cli.bench.stream import BenchRecord, stream_answer
from cli.bench.workload import synthetic
from sluice_client.qoe import QoeTarget


class HttpEngine(EngineProcess):
    """What the two servers share: the client. Both run on the same cores as it."""

    name = ""

    def __init__(self, log_dir: Path) -> None:
        super().__init__()
        self._log = log_dir / f"{self.name}.log"
        self.url = ""
        self.more: dict[str, Any] = {}
        """Further fields of every request."""
        self._model = ""
        self._num_output = 0

    async def run(self, prompts: Sequence[Sequence[int]]) -> Figures:
        """Send all prompts at once and read their streams.

        Raises:
            RuntimeError: an answer failed or is too short.
        """
        bodies = [self._body(prompt) for prompt in prompts]
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=RUN_LIMIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:

            async def send(index: int, outcome: BenchRecord) -> None:
                await stream_answer(session, f"{self.url}/v1/completions", bodies[index], load.clock, outcome)

            load = BenchLoad(synthetic(len(prompts), 1, self._num_output), send)
            await load.run()
        summary = summarise(load.outcomes, QoeTarget(), is_held_back=False)
        # random weights may say nothing but halves of characters, which is an answer without text, but is one
        wrong = [outcome for outcome in load.outcomes if outcome.failure not in ("", "empty")]
        num_tokens = sum(outcome.num_output for outcome in load.outcomes)
        if wrong or num_tokens != len(prompts) * self._num_output:
            raise RuntimeError(f"answers failed or ended early: {summary['failure_details']}")
        tokens_per_s = summary["output_tokens_per_s"] * num_tokens / summary["num_output_tokens"]
        return Figures(tokens_per_s, summary["ttft_s"]["mean"], summary["tpot_s"]["mean"])

    def _body(self, prompt: Sequence[int]) -> bytes:
        fields = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": self._num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.more,
        }
        return json.dumps(fields).encode()


class SluiceServer(HttpEngine):
    """`sluice up` with one worker."""

    name = "sluice-http"

    async def start(self, setting: Setting) -> None:
        flags = ["--model", str(setting.checkpoint), "--dtype", setting.dtype, "--memory", setting.memory]
        flags += ["--max-model-len", str(setting.max_len), "--threads", str(setting.threads)]
        self._num_output, self._model = setting.num_output, setting.checkpoint.name
        self.url = (await self.up(*flags, log=self._log))["url"]


class VllmServer(HttpEngine):
    """vLLM's OpenAI server.

    Args:
        python: interpreter of vLLM's environment.
        log_dir: where what it prints goes.
    """

    name = "vllm-http"

    def __init__(self, python: str, log_dir: Path) -> None:
        super().__init__(log_dir)
        self._python = python

    async def start(self, setting: Setting) -> None:
        port = free_port()
        self._num_output, self._model, self.url = setting.num_output, "m", f"http://127.0.0.1:{port}"
        flags = ["--model", str(setting.checkpoint), "--dtype", setting.dtype, "--max-model-len", str(setting.max_len)]
        flags += ["--max-num-seqs", "64", "--no-enable-prefix-caching", "--max-num-batched-tokens", "2048"]
        if setting.num_blocks:  # of 32 tokens at least on a CPU; the first one holds nothing
            flags += ["--block-size", "32", "--num-gpu-blocks-override", str(setting.num_blocks // 2 + 1)]
        flags += ["--port", str(port), "--host", "127.0.0.1", "--served-model-name", self._model]
        argv = [self._python, "-m", "vllm.entrypoints.openai.api_server", *flags]
        await self.spawn(*argv, env=vllm_env(setting, self._python), log=self._log)
        self._drained = asyncio.create_task(self._drain(), name="vllm-output")
        await asyncio.wait_for(self._wait_healthy(), START_LIMIT_S)

    async def stop(self) -> None:
        await super().stop()
        if self._process is not None:
            await self._drained

    async def _drain(self) -> None:
        """Keep its pipe from filling."""
        assert self.process.stdout is not None, "piped"
        while await self.process.stdout.read(1 << 16):
            continue

    async def _wait_healthy(self) -> None:
        async with aiohttp.ClientSession() as session:
            while self.process.returncode is None:
                try:
                    async with session.get(f"{self.url}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)
        raise RuntimeError(f"it ended with exit code {self.process.returncode}; its log says why")
