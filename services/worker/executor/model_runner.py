"""Runs the steps of a model, or of one stage of it, on one device.

Opened by `load_runner` (runner.py); called from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from services.worker.attention.remote import RemoteKeys
from services.worker.contract.arrays import I32, I64
from services.worker.contract.batch import Batch, BatchOutput
from services.worker.contract.executor import BatchFailedError, CopyFailedError, HostCopy, HostMemory, KvCapacity
from services.worker.contract.remote import RemoteLostError
from services.worker.executor.launched import EndedStep, Launched
from services.worker.executor.step import ForwardPass
from services.worker.executor.step_threads import StepThreads
from services.worker.memory.host_kv import HostKV
from services.worker.memory.host_link import send
from services.worker.memory.kv_cache import KVCache
from services.worker.memory.model_memory import ModelMemory
from services.worker.sampling.choosing import Chooser
from services.worker.sampling.guides import RowsBrokenError
from services.worker.sampling.own_samples import OwnSamples
from shared.layers import LayerRange

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine, the reports and a person need to know about a loaded model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    """Longest sequence, prompt and output."""
    max_batch_tokens: int
    """Tokens of one batch at most."""
    num_layers: int
    """Of the whole model."""
    layers: LayerRange
    """Those that are here."""
    hidden_size: int
    num_parameters: int
    """Of the whole model."""
    param_bytes: int
    kv_bytes: int
    reserve_bytes: int
    """Kept free for activations and workspace."""
    bytes_per_block: int
    capacity: KvCapacity
    device: str
    dtype: str
    dry_step_s: float
    """Seconds that the largest step takes, by one of as many tokens that was measured."""
    kernels: str
    """What computes the forward pass: a `Kernels.name`."""
    build: str
    """The same to the version: a `Kernels.build`."""
    threads: StepThreads
    """Of a step on the CPU."""

    @property
    def is_last(self) -> bool:
        """The model's last layer and its head are here."""
        return self.layers.end == self.num_layers


@dataclass(frozen=True, slots=True)
class _Running:
    """A step that the device computes; see `Launched`."""

    step_id: int
    output: Callable[[], BatchOutput]
    is_done: bool = False

    def end(self) -> BatchOutput:
        """Wait for the step; see `Launched`."""
        with _failing(self.step_id):
            return self.output()


class ModelRunner:
    """A model or a stage of it on one device, and what it knows of the engine's rows.

    Args:
        forward: the model over its cache.
        memory: in which both lie.
        chooser: of the rows' next tokens.
        max_rows: rows of the engine's table.
        samples: of the same rows.
        overlaps: its steps are to be launched before those before them have ended.
        owns_memory: the memory is closed with the runner; else somebody has lent it.
    """

    def __init__(  # noqa: PLR0913  one argument per part that is joined here
        self,
        info: ModelInfo,
        forward: ForwardPass,
        memory: ModelMemory,
        chooser: Chooser,
        *,
        max_rows: int,
        samples: OwnSamples,
        overlaps: bool = False,
        owns_memory: bool = True,
    ) -> None:
        self.info = info
        self._samples = samples
        self.overlaps = overlaps
        """Its steps are to be launched before those before them have ended."""
        self._ended_s = 0.0
        self._forward: ForwardPass | None = forward
        self.memory = memory
        self._owns_memory = owns_memory
        self._host: HostKV | None = None
        self._is_sound = True
        self._device = forward.cache.keys[0].device
        max_blocks = -(-info.max_model_len // info.capacity.block_size)
        self._tables: I32 = np.zeros((max_rows, max_blocks), dtype=np.int32)
        """Block ids by row of the engine's table; those past the end of a row's sequence mean nothing."""
        self._chooser = chooser

    @property
    def capacity(self) -> KvCapacity:
        """KV memory."""
        return self.info.capacity

    @property
    def cache(self) -> KVCache:
        """Keys and values of all layers."""
        return self._open().cache

    @property
    def remote(self) -> RemoteKeys | None:
        """Keys of its rows that lie elsewhere; see `ForwardPass`."""
        return self._open().remote

    @remote.setter
    def remote(self, remote: RemoteKeys | None) -> None:
        """Attend the keys of these rows where they lie, from the next step on."""
        self._open().remote = remote

    @property
    def host(self) -> HostKV | None:
        """Host memory for its KV; None: there is none."""
        return self._host

    def open_host(self, num_blocks: int) -> None:
        """Take host memory for so many blocks, and measure how long one takes to get there. Before the first step."""
        host = HostKV(self.cache, num_blocks)
        self.use_host(host, HostMemory(num_blocks, self.info.bytes_per_block, host.measure_copy_s()))

    def use_host(self, host: HostKV, memory: HostMemory) -> None:
        """Copy KV to host memory that somebody keeps, and back. Before the first step.

        Args:
            host: of this runner's cache.
            memory: what is said of it.
        """
        self._host = host
        self.info = replace(self.info, capacity=replace(self.info.capacity, host=memory))

    @property
    def copies_beside(self) -> bool:
        """Whether `copy` may be called while a step runs, in each direction from a thread of its own."""
        return self._host is not None and self._host.is_beside

    def copy(self, copy: HostCopy) -> None:
        """Copy blocks between device and host. The steps before have run that wrote them; those after see the result.

        Raises:
            CopyFailedError: for whatever reason.
        """
        assert self._host is not None, "this runner has no host memory"
        device, host = (torch.from_numpy(ids.astype(np.int64)) for ids in (copy.device, copy.host))
        try:
            with torch.inference_mode():
                if copy.to_host:
                    self._host.store(device, host)
                else:
                    self._host.fetch(host, device)
        except Exception as error:  # whatever torch raises: the engine computes the KV again
            raise CopyFailedError(copy.copy_id, f"{type(error).__name__}: {error}") from error

    def run(self, batch: Batch, hidden: torch.Tensor | None = None) -> BatchOutput:
        """Compute one step up to its tokens.

        Drops, admits, changes of block tables and copies are applied also when the step then fails.

        Args:
            batch: the whole step.
            hidden: [t, hidden_size] behind the stage before, in the model's dtype; None: the first layers are here.

        Raises:
            BatchFailedError: the step did not finish, for whatever reason.
        """
        return self.launch(batch, hidden).end()

    def launch(self, batch: Batch, hidden: torch.Tensor | None = None) -> Launched:
        """Begin one step; else as `run`. Decodes may begin with `OWN_SAMPLE`.

        Where the device computes beside the host, this returns while it does, unless the host has to look at the
        logits: for rows with rules or log-probabilities, or with filters that may reach far. With guided rows it
        returns when their masks are made, which the step before has to have ended for.
        """
        began_s = time.perf_counter()
        return self._applied(batch, lambda known: self._begin(known, hidden, began_s))

    def advance(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one step up to the last layer here; return its hidden states. Else as `run`."""
        return self._applied(batch, lambda known: self._open().advance(known, self._tables, hidden))

    def skip(self, batch: Batch) -> None:
        """Only apply what a batch says of rows, tables and copies: its step has failed elsewhere. Else as `run`."""
        self._applied(batch, lambda _: None)

    def try_step(self, batch: Batch) -> None:
        """Compute one step for its cost alone; where the first layers are elsewhere, from made-up hidden states."""
        hidden = self.made_up_hidden(batch)
        if self.info.is_last:
            self.run(batch, hidden)
        else:
            self.advance(batch, hidden)

    def made_up_hidden(self, batch: Batch) -> torch.Tensor | None:
        """Return [t, hidden_size] numbers that depend on each token alone, for a stage behind the first; else None."""
        if self.info.layers.first == 0:
            return None
        tokens = torch.from_numpy(batch.tokens.astype(np.int64)).unsqueeze(1)
        made_up = ((tokens * 31 + torch.arange(self.info.hidden_size) * 17) % 101).float() / 101 - 0.5
        return made_up.to(self._device, self.cache.keys[0].dtype)

    def logits(self, batch: Batch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one step; instead of sampling, return the logits [n, vocab_size], float32, of each last token."""
        with torch.inference_mode():
            self._apply(batch)
            scores = self._open().run(batch, self._tables, np.arange(len(batch.rows)), hidden)
            return scores.logits.clone()

    @property
    def is_open(self) -> bool:
        """It can still run steps."""
        return self._forward is not None

    def close(self) -> None:
        """Give back parameters and KV; tensors of theirs must not be touched any more. Memory stays if it is lent.

        Idempotent.
        """
        self._forward = None
        self._host = None
        self._chooser.close()
        if self._owns_memory:
            self.memory.close()

    def _applied(self, batch: Batch, compute: Callable[[Batch], T]) -> T:
        """Apply a batch and return what is computed then, of the batch with the tokens that it begins with."""
        with _failing(batch.step_id), torch.inference_mode():
            known = self._samples.fill_in(batch)
            if known is None:
                self._apply(_without_rows(batch))
                raise BatchFailedError(batch.step_id, "it begins with tokens of a step that has failed")
            self._apply(known)
            return compute(known)

    def _open(self) -> ForwardPass:
        assert self._forward is not None, "the runner is closed"
        return self._forward

    def _apply(self, batch: Batch) -> None:
        """Take in what the batch says of rows and blocks.

        The engine says it once. If it cannot be taken in, later steps would compute with blocks that were never copied
        or with the rules of others, so all of them fail, and the engine gives the executor up.
        """
        assert self._is_sound, "an earlier step's rows and blocks were taken in by half; the worker must start anew"
        self._is_sound = False
        for admitted in batch.admits:
            self._samples.admit(admitted.row)
        self._chooser.take_in(batch)
        delta = batch.table_delta
        if len(delta.row):
            self._tables[delta.row, delta.index] = delta.block_id
        if len(batch.copies.source):
            source, target = (blocks.astype(np.int64) for blocks in (batch.copies.source, batch.copies.target))
            self._open().cache.copy_blocks(send(source, self._device), send(target, self._device))
        self._is_sound = True

    def _begin(self, batch: Batch, hidden: torch.Tensor | None, began_s: float) -> Launched:
        sampled: I64 = batch.sample.nonzero()[0]
        rows = batch.rows[sampled]
        self._chooser.prepare(rows, on_host=self._device.type == "cpu")
        scores = self._open().run(batch, self._tables, sampled, hidden)
        position = (batch.start + batch.num_tokens)[sampled].astype(np.int64)
        choosing = self._chooser.begin(scores, rows, position)

        def end() -> tuple[I64, BatchOutput]:
            finite, largest, *columns = choosing.fetching.end()
            self._check(batch, rows, finite, largest)
            chosen, said = choosing.end(largest, *columns)
            tokens = np.full(len(batch.rows), -1, dtype=np.int32)
            tokens[sampled] = chosen
            logprobs = {int(sampled[i]): each for i, each in said.items()} or None
            return chosen, BatchOutput(batch.step_id, tokens, self._took_s(began_s), logprobs)

        if choosing.on_device is not None:
            self._samples.put_on_device(rows, position, choosing.on_device)
            return _Running(batch.step_id, lambda: end()[1])
        chosen, output = end()
        self._samples.put(rows, position, chosen)
        return EndedStep(output)

    def _took_s(self, began_s: float) -> float:
        """Return how long a step took that ends now: since it began, or since the one before it ended.

        That one has ended on the device, and whoever waits for it in another thread has been woken, when this one does.
        """
        now_s = time.perf_counter()
        took_s, self._ended_s = now_s - max(began_s, self._ended_s), now_s
        return took_s

    def _check(self, batch: Batch, rows: I32, finite: I64, largest: I64) -> None:
        """Name the rows whose hidden states or logits are not numbers: sampled from, they would be nonsense."""
        for checked, is_finite in ((batch.rows, finite != 0), (rows, largest < self.info.vocab_size)):
            if not is_finite.all():
                guilty = tuple(int(row) for row in checked[~is_finite])
                raise BatchFailedError(batch.step_id, "the model's numbers are not finite", guilty)


@contextmanager
def _failing(step_id: int) -> Iterator[None]:
    """Let whatever torch raises be the batch's failure: the engine finds the guilty row."""
    try:
        yield
    except (BatchFailedError, RemoteLostError):
        raise
    except RowsBrokenError as error:
        raise BatchFailedError(step_id, error.cause, error.rows) from error
    except Exception as error:
        raise BatchFailedError(step_id, f"{type(error).__name__}: {error}") from error


def _without_rows(batch: Batch) -> Batch:
    """Return what a batch says beside its rows."""
    none: I32 = np.zeros(0, dtype=np.int32)
    return replace(batch, rows=none, num_tokens=none, start=none, tokens=none, sample=np.zeros(0, dtype=np.bool_))
