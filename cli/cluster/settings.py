"""Settings of `sluice up` and `sluice demo`: flag > `SLUICE_<FIELD>` > sluice.toml > default (`process.config`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from cli.run_file import find_run, find_runs
from shared.errors import StartupError
from shared.host import count_cores
from shared.process.config import (
    ApiKey,
    Host,
    HostNames,
    ModelNames,
    Origins,
    ReasoningParser,
    ServiceSettings,
    Size,
    ToolParser,
    load,
)
from shared.process.config_fields import AUTO
from shared.systems import DEFAULT_SYSTEM


def _none_if_auto(value: object) -> object:
    return None if value == AUTO else value


class UpSettings(ServiceSettings):
    """A cluster on this machine."""

    model: str = ""
    """Folder of a checkpoint in Hugging Face format, or its id there (`owner/name`); empty: the model that ships."""
    served_model_name: ModelNames = ()
    """Names under which the model is served, with commas; answers carry the first. None: the id or folder's name."""
    generation_config: Literal["auto", "none"] = "auto"
    """Where sampling parameters come from that a request does not give: the model's generation_config.json, or none."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model's thinking is told from what it says: auto (by its chat template), none, qwen3 or deepseek_r1."""
    tool_parser: ToolParser = "auto"
    """How the model's calls of tools are found: auto (by its chat template), none, hermes, llama3, mistral or phi."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Worker processes; each holds a whole copy of the model."""
    device: str = AUTO
    """`cpu`, `cuda` (the workers share out the devices in turn) or `cuda:<index>`; `auto`: see `shared.sizing`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of parameters and KV; bfloat16 halves both."""
    memory: Annotated[Size | None, BeforeValidator(_none_if_auto)] = None
    """Hard memory budget of each worker, for parameters, KV and workspace; what the first and last leave becomes KV.
    Empty, or `auto`: by the model and what is free."""
    host_memory: Annotated[Size, Field(ge=0)] | None = None
    """Memory of the host of each worker, beside `memory`, for KV of requests that give way; 0: none. Empty: the workers
    share a tenth of what is free, and none takes more than `memory` or 16 GiB."""
    system: str = DEFAULT_SYSTEM
    """Named set of policies."""
    host: Host = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port of the API; 0 picks a free one."""
    prefix_caching: bool = True
    """Workers keep the KV of ended sequences until its memory is needed, for requests that begin alike."""
    graphs: bool = True
    """Workers record steps of decodes as CUDA graphs, where FlashInfer computes attention."""
    fused: bool = True
    """Workers on CUDA compute norms, rotary embeddings, gates and samples by Triton's kernels."""
    overlap: bool | None = None
    """Workers launch steps of decodes before those before them have ended; empty: on a GPU."""
    deterministic: bool = False
    """The same text whatever else is in the batch; somewhat slower."""
    max_model_len: Annotated[int, Field(ge=0)] = 0
    """Most tokens of one request, prompt and output; 0 takes the checkpoint's own limit, or what the memory holds."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of each worker's steps; 0 shares this machine's cores out evenly, and takes more than one where that
    gains."""
    kernels: Literal["auto", "native", "flashinfer", "torch"] = "auto"
    """What computes the workers' steps; `auto` takes the best that is there."""
    api_keys_file: Path | None = None
    """File of keys (`sluice keys create`); with it, or `api_key`, the API asks for a key."""
    api_key: ApiKey = ""
    """One key that may infer and read metrics, of 16 characters at least; better given as a variable than as a flag."""
    allow_no_key: bool = False
    """Listen on another address than this machine's own although the API asks for no key."""
    allow_host: HostNames = ()
    """Names, with commas, by which the API may be asked without keys, besides `host`, addresses and localhost."""
    allow_origin: Origins = ()
    """Origins, with commas, whose pages may use the API from a browser (`https://chat.example`); `*` with keys only."""
    log_dir: str = ""
    """Folder for the logs of every process; empty: a temporary one, removed at the end."""
    costs_kept: Path = Path("~/.cache/sluice/costs")
    """Folder where workers keep what their steps have cost, so that they know it at once when they start again."""
    verbose: bool = False
    """`sluice up` shows every warning of its processes, not only errors, and snippets to paste."""
    start_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 1800.0
    """Seconds that the cluster may take to load its models."""
    drain_limit_s: Annotated[float, Field(ge=0, le=3600)] = 120.0
    """Seconds that running answers get to finish after the first Ctrl-C or SIGTERM."""

    @property
    def has_keys(self) -> bool:
        """Whether the API asks for a key."""
        return self.api_keys_file is not None or bool(self.api_key)

    @property
    def has_own_broker(self) -> bool:
        """Whether the cluster starts a broker: yes, unless one is named (`--nats-url`, `NATS_URL`, sluice.toml)."""
        return "nats_url" not in self.model_fields_set

    def cores_per_worker(self, num_cores: int | None = None) -> int:
        """Return the cores that each worker may take on the CPU where `threads` does not say."""
        return max(1, (num_cores or count_cores()) // self.workers)


def load_up_settings(flags: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> UpSettings:
    """Return the settings; flags that are None were not given.

    Args:
        flags: by field name.
        defaults: of the command, weaker than environment and file (`demo` has two workers).

    Raises:
        ConfigError: one line that says what is wrong.
    """
    settings = load(UpSettings, "", flags_to_argv(flags))
    missing = {name: value for name, value in (defaults or {}).items() if name not in settings.model_fields_set}
    return settings.model_copy(update=missing)


def flags_to_argv(flags: Mapping[str, Any]) -> list[str]:
    """Return the flags as they are typed; those that are None were not given."""
    argv: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            argv.append(f"{flag}={value}")
    return argv


def load_bus_settings(flags: Mapping[str, Any]) -> UpSettings:
    """Return the settings with the broker that is named, else with that of the cluster that runs here, if one does.

    Raises:
        ConfigError: one line that says what is wrong.
        CommandError: several run here.
    """
    settings = load_up_settings(flags)
    if not settings.has_own_broker:
        return settings
    name = settings.cluster if "cluster" in settings.model_fields_set else None
    if name is not None and not any(run.is_meant_by(name) for run in find_runs()):
        return settings
    run = find_run(name, "--cluster and its id, or --nats-url")
    return settings if run is None else settings.model_copy(update={"nats_url": run.nats_url, "cluster": run.cluster})


def log_dir_of(settings: UpSettings, run_dir: Path) -> Path:
    """Return where the logs go, made if it does not exist.

    Raises:
        StartupError: it cannot be made, or nothing can be written there.
    """
    folder = Path(settings.log_dir) if settings.log_dir else run_dir / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        hint = f"Set {'--log-dir' if settings.log_dir else 'TMPDIR'} to a folder of yours"
        raise StartupError(f"no log can be written to {folder} ({error.strerror})", hint) from error
