"""The engines that `benchmarks.peers` compares: each is started once per dtype and then asked for runs, in turn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.harness import ROOT, end_children_on_sigterm

START_LIMIT_S = 1800.0
RUN_LIMIT_S = 600.0
STOP_LIMIT_S = 30.0
LLAMA_TRIES = 5
"""`llama-batched-bench` ends without a figure every now and then."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What every engine is given."""

    checkpoint: Path
    dtype: str
    threads: int
    max_len: int
    memory: str
    kv_gib: int
    num_output: int
    num_blocks: int = 0
    """KV blocks of 16 tokens, of vLLM; 0: as many as the memory gives."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One run."""

    tokens_per_s: float
    ttft_s: float
    itl_s: float


class Engine(Protocol):
    """One engine."""

    name: str

    async def start(self, setting: Setting) -> None:
        """Return when it can generate."""

    async def run(self, prompts: Sequence[Sequence[int]]) -> Figures:
        """Generate for all prompts at once."""

    async def stop(self) -> None:
        """End its processes."""

    @property
    def pid(self) -> int | None:
        """The process that holds it, whose children are its own; None if there is none between runs."""


class EngineProcess:
    """A process that belongs to an engine."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "started"
        return self._process

    async def spawn(self, *argv: str, env: Mapping[str, str] | None = None, log: Path) -> None:
        end_children_on_sigterm()
        with log.open("ab") as file:
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                env={**os.environ, **(env or {})},
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=file,
                limit=1 << 20,
                start_new_session=True,
            )

    async def up(self, *flags: str, log: Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Start `sluice up` on a free port; return what it says when it serves."""
        await self.spawn(sys.executable, "-m", "cli.main", "up", "--json", "--port", "0", *flags, env=env, log=log)
        return await self.read_line(START_LIMIT_S)

    async def stop(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), STOP_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what it left: some engines' workers outlive them
        await self._process.wait()

    async def read_line(self, limit_s: float) -> dict[str, Any]:
        """Return the next line of its output, as JSON.

        Raises:
            RuntimeError: it ended instead.
        """
        assert self.process.stdout is not None, "piped"
        line = await asyncio.wait_for(self.process.stdout.readline(), limit_s)
        if not line:
            raise RuntimeError(f"it ended with exit code {await self.process.wait()}; its log says why")
        found: dict[str, Any] = json.loads(line)
        return found


class ChildEngine(EngineProcess):
    """An engine without HTTP, as a child that speaks as `benchmarks/peers_child.py` does.

    Args:
        name: shown in the tables.
        argv: before checkpoint, dtype, threads and longest sequence.
        log_dir: where what it prints goes.
        has_memory: whether the budget comes as a further argument.
    """

    def __init__(self, name: str, argv: Sequence[str], log_dir: Path, *, has_memory: bool = False) -> None:
        super().__init__()
        self.name = name
        self._argv = argv
        self._log = log_dir / f"{name}.log"
        self._has_memory = has_memory
        self._num_output = 0

    async def start(self, setting: Setting) -> None:
        self._num_output = setting.num_output
        values = [str(setting.checkpoint), setting.dtype, str(setting.threads), str(setting.max_len)]
        values += [setting.memory] if self._has_memory else []
        env = vllm_env(setting, self._argv[0]) if "vllm" in self._argv else None
        await self.spawn(*self._argv, *values, env=env, log=self._log)
        await self.read_line(START_LIMIT_S)

    async def run(self, prompts: Sequence[Sequence[int]]) -> Figures:
        assert self.process.stdin is not None, "piped"
        command = {"prompts": [list(prompt) for prompt in prompts], "num_output": self._num_output}
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()
        return Figures(**await self.read_line(RUN_LIMIT_S))


def vllm_env(setting: Setting, python: str) -> dict[str, str]:
    """Return what vLLM needs on a CPU: KV memory, threads bound to cores, Intel's OpenMP where it is installed."""
    env = {
        "VLLM_CPU_KVCACHE_SPACE": str(setting.kv_gib),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    return env | ({"LD_PRELOAD": str(openmp)} if openmp.is_file() else {})


class LlamaBench:
    """llama.cpp's `llama-batched-bench`: one process per run, neither sampling nor server.

    Args:
        program: the binary.
        gguf_python: interpreter with gguf and safetensors, which converts the checkpoint.
        folder: for the converted files and the log.
    """

    name = "llama.cpp"

    def __init__(self, program: str, gguf_python: str, folder: Path) -> None:
        self._program = program
        self._gguf_python = gguf_python
        self._folder = folder
        self._setting: Setting | None = None
        self._file = Path()

    @property
    def pid(self) -> int | None:
        return None

    async def start(self, setting: Setting) -> None:
        self._setting = setting
        self._file = self._folder / f"{setting.checkpoint.name}-{setting.dtype}.gguf"
        if self._file.is_file():
            return
        script = str(ROOT / "benchmarks" / "peers_gguf.py")
        await self._output(self._gguf_python, "-P", script, str(setting.checkpoint), setting.dtype, str(self._file))

    async def run(self, prompts: Sequence[Sequence[int]]) -> Figures:
        assert self._setting is not None, "started"
        setting, batch, num_prompt = self._setting, len(prompts), len(prompts[0])
        kv_type = "bf16" if setting.dtype == "bfloat16" else "f32"
        context, threads = batch * (num_prompt + setting.num_output) + 64, setting.threads
        line = f"-c {context} -b 2048 -ub 512 -npp {num_prompt} -ntg {setting.num_output} -npl {batch}"
        kind = f"-t {threads} -tb {threads} -fa on -ctk {kv_type} -ctv {kv_type}"
        flags = ["-m", str(self._file), *line.split(), *kind.split()]
        for _ in range(LLAMA_TRIES - 1):
            with contextlib.suppress(RuntimeError):
                return parse_llama(await self._output(self._program, *flags))
        return parse_llama(await self._output(self._program, *flags))

    async def stop(self) -> None:
        return

    async def _output(self, *argv: str) -> str:
        with (self._folder / f"{self.name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, stderr=log)
            out, _ = await asyncio.wait_for(process.communicate(), RUN_LIMIT_S)
        if process.returncode:
            raise RuntimeError(f"it ended with exit code {process.returncode}; its log says why")
        return out.decode()


def parse_llama(text: str) -> Figures:
    """Return the figures of the table's last row: PP, TG, B, N_KV, T_PP s, S_PP t/s, T_TG s and more, between bars.

    Raises:
        RuntimeError: there is no such row.
    """
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if line.lstrip().startswith("|")]
    for row in reversed(rows):
        try:
            _, num_output, batch, _, prompt_s, _, output_s = (float(cell) for cell in row[:7])
        except ValueError:  # the head, or the line below it
            continue
        return Figures(batch * num_output / (prompt_s + output_s), prompt_s, output_s / num_output)
    raise RuntimeError("llama-batched-bench printed no row")
