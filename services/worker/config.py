"""Settings of one worker process: flag > environment > sluice.toml > default (`shared.process.config`)."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, field_validator, model_validator

from shared.addresses import normal_host
from shared.process.config import Host, ModelNames, ServiceSettings, Size
from shared.process.config_fields import Auto
from shared.systems import DEFAULT_SYSTEM

_OPENMP_SPINS: Final = "500"
"""How often a thread of torch's operators looks whether the others are there before it sleeps, in some 10 to 30 us."""


class ExecutorKind(StrEnum):
    """What runs the steps."""

    TORCH = "torch"  # the model's tensors, on `device`
    MODELLED = "modelled"  # no tensors: takes the time that a cost profile says, tokens are a hash of the context


class Dtype(StrEnum):
    """Type of parameters and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return 4 if self is Dtype.FLOAT32 else 2


class LoadFrom(StrEnum):
    """Where dropped parameters come back from beside serving."""

    HOST = "host"
    PEERS = "peers"


class KernelKind(StrEnum):
    """What computes the forward pass."""

    AUTO = "auto"  # the worker's own kernels on the CPU, FlashInfer on CUDA, and torch's operators where these cannot
    NATIVE = "native"  # the worker's own, or no start
    FLASHINFER = "flashinfer"  # FlashInfer's attention, or no start
    TORCH = "torch"  # torch's operators


class WorkerSettings(ServiceSettings):
    """One worker: one device, one copy of the model, one hard memory budget."""

    model: Path
    """Folder of the checkpoint in Hugging Face format."""
    served_model_name: ModelNames = ()
    """Names under which the model is served, with commas; the worker is known by the first. None: the folder's name."""
    system: str = DEFAULT_SYSTEM
    """Named set of policies (`shared.systems`)."""
    executor: ExecutorKind = ExecutorKind.TORCH
    """`modelled` computes nothing and is for load tests of the services around it."""
    profile: str = "qwen2.5-14b-tp1-a800"
    """Cost profile of the modelled executor: a shipped name, or a path to a TOML file."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:<index>`."""
    dtype: Annotated[Dtype, Auto()] = Dtype.FLOAT32
    """Type of parameters and KV; bfloat16 halves both. Not named: by the model and what is free (`shared.sizing`)."""
    memory: Annotated[Size, Auto()] = 1024**3
    """Hard budget for parameters, KV and workspace, in bytes; what the first and last leave becomes KV. Not named: by
    the model and what is free, where the workers of this host share what it has."""
    host_memory: Annotated[Size, Field(ge=0)] | None = None
    """Memory of the host for KV of preempted sequences, in bytes, beside `memory`; 0: none. Empty: a tenth of what is
    free there (on the CPU, beyond `memory`), shared among `host_workers`, and at most `memory` or 16 GiB. Systems that
    form groups take none."""
    host_workers: Annotated[int, Field(ge=1, le=1024)] = 1
    """Workers on this host, which share what `memory` and `host_memory` take of it by default."""
    host_link_gb_per_s: Annotated[float, Field(gt=0)] = 25.0
    """Gigabytes (10^9) per second between device and host, each way; of the modelled executor, others measure it."""
    page_bytes: Annotated[Size, Field(ge=4096)] = 2 * 1024**2
    """Size of the pages of `memory` that change hands between parameters and KV, a multiple of 4 KiB, on CUDA of 2 MiB;
    only systems that drop layers take it."""
    stage_host: Host = "127.0.0.1"
    """Address on which other workers reach this one: who fetches its requests, and the other stages of a group."""
    stage_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Port for them; 0 takes any that is free."""
    stage_advertise: str = ""
    """Name or address under which they find it; empty: `stage_host`, or this host's name if that is every address."""
    stage_limit_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Seconds in which the stages of a group have to find each other; else each is a whole instance again."""
    exchange_memory: Annotated[Size, Field(ge=0)] = 256 * 1024**2
    """Memory of the host, in bytes, for KV that changes hands when a group forms or dissolves; taken for that time,
    beside `memory`. What does not fit is computed again; 0: all of it. Only systems that drop layers take it."""
    exchange_limit_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Longest time, in seconds, after which KV that has not come is computed again; readers stand still meanwhile. It
    is given up sooner, after 2 s and four times what its bytes take by `exchange_gb_per_s`."""
    exchange_gb_per_s: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """At which KV changes hands, 10^9 bytes per second each way: what a planner counts with. One, with a checksum, is
    what two processes of one machine reach."""
    hand_over_pages: bool | None = None
    """Where all stages of a group that forms are on one device, hand KV over in the pages where it lies instead of
    copying it; then nobody waits for it, nor attends it elsewhere. Empty: on a GPU. On the CPU the memory of a worker
    that has died stays taken as long as another has pages of it. Only systems that drop layers take it."""
    load_from: LoadFrom = LoadFrom.HOST
    """Where dropped parameters come back from beside serving: `host`, the checkpoint in the host's memory or on its
    disk, or `peers`, the stages of the group that compute with them. What the one does not give, or with other bytes
    than were loaded first, the other is asked for. Only systems that drop layers take it."""
    max_model_len: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one request, prompt and output; 0 takes the checkpoint's own limit, or what the memory holds."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Token slots of one KV block; larger wastes more at the end of a sequence, smaller costs bookkeeping."""
    max_blocks: Annotated[int, Field(ge=0)] = 0
    """KV blocks used at most, however much memory there is; 0 uses all. Small values put a system under pressure. Not
    for systems that drop parameters."""
    max_sequences: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Sequences taken at most, running and waiting; more are refused as `full`."""
    max_batch_rows: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Sequences in one step at most."""
    max_batch_tokens: Annotated[int, Field(ge=1, le=1_048_576)] = 2048
    """Tokens in one step at most; larger speeds up prompts and makes decodes wait longer."""
    prefix_caching: bool = True
    """Keep the KV of ended sequences until its memory is needed, for requests that begin alike."""
    pull_prefixes: bool = True
    """Bring KV of a prompt from a worker that has it, if that is quicker than computing it."""
    deterministic: bool = False
    """The same text whatever else is in the batch; somewhat slower."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of every step on the CPU; 0: as many as gain for a step, one for a short one."""
    cores: Annotated[int, Field(ge=0, le=1024)] = 0
    """Cores that steps may take where `threads` is 0; 0: all that the process may run on."""
    kernels: KernelKind = KernelKind.AUTO
    """What computes the forward pass: `auto`, `native` (on the CPU), `flashinfer` (on CUDA) or `torch`."""
    graphs: bool = True
    """Record steps of decodes as CUDA graphs, where FlashInfer computes attention; takes some seconds at the start."""
    fused: bool = True
    """On CUDA compute norms, rotary embeddings, gates and samples by Triton's kernels, fewer than torch's."""
    overlap: bool | None = None
    """Launch a step of decodes before the one before it has ended, so that the device need not wait for the host in
    between; a request that comes meanwhile waits for one step more. Empty: on a GPU."""
    report_period_s: Annotated[float, Field(gt=0, le=60)] = 0.5
    """Seconds between two reports to the monitor; a change is reported at once."""
    step_log_size: Annotated[int, Field(ge=0, le=65_536)] = 2048
    """Steps whose shapes and durations are kept for `sluice profile`; each takes 8 bytes per row. 0 keeps none."""
    costs_kept: Path | None = None
    """Folder where it is kept what steps have cost, by model, device, build and threads, so that a worker that starts
    again knows it at once. Empty: nowhere, and each start begins with a few steps of its own."""
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 3.0
    """Seconds without a word of a dispatcher after which its sequences are paused; it speaks every half second."""
    orphan_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0
    """Seconds without a word after which they end; until then another dispatcher may take them over."""
    step_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 10.0
    """Seconds after which a step counts as stuck, and the worker ends; at least five times its largest step."""
    drain_limit_s: Annotated[float, Field(ge=0, le=3600)] = 120.0
    """Seconds that running sequences get to finish after SIGTERM."""

    @model_validator(mode="after")
    def _check_lease(self) -> Self:
        if self.orphan_s <= self.lease_s:
            raise ValueError(f"orphan_s ({self.orphan_s:g}) must be larger than lease_s ({self.lease_s:g})")
        return self

    @field_validator("stage_advertise")
    @classmethod
    def _check_stage_advertise(cls, value: str) -> str:
        return normal_host(value) if value else value

    def stage_address(self) -> str:
        """Return the name or address under which other workers find this one."""
        is_every = self.stage_host in {"0.0.0.0", "::"}  # noqa: S104  compared
        return self.stage_advertise or (socket.gethostname() if is_every else self.stage_host)

    def model_name(self) -> str:
        """Return the name under which the model is served."""
        return self.served_model_name[0] if self.served_model_name else self.model.resolve().name


def shorten_waits() -> None:
    """Let threads of torch's operators sleep soon, unless the environment says something else about their waits.

    Takes effect before torch is imported. OpenMP's runtime itself lets them spin for milliseconds.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _OPENMP_SPINS)
