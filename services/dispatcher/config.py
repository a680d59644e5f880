"""Settings of one dispatcher process: flag > environment > sluice.toml > default (`shared.config`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shared.config import ModelNames, ServiceSettings, Size
from shared.systems import DEFAULT_SYSTEM

_Seconds = Annotated[float, Field(gt=0, le=86_400)]


class DispatcherSettings(ServiceSettings):
    """One dispatcher: the OpenAI-compatible front of a cluster."""

    model: Path
    """Folder of the checkpoint; tokenizer, chat template and configuration are read from it."""
    served_model_name: ModelNames = ()
    """Names under which the model is served, with commas; answers carry the first. None: the folder's name."""
    generation_config: Literal["auto", "none"] = "auto"
    """Where sampling parameters come from that a request does not give: the model's generation_config.json, or none."""
    system: str = DEFAULT_SYSTEM
    """Named set of policies (`shared.systems`)."""
    host: str = "127.0.0.1"
    """Address to listen on. There are no keys yet, so anything but this machine must be protected by other means."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 takes a free one."""
    max_requests: Annotated[int, Field(ge=1, le=65_536)] = 4096
    """Requests at a time, running and waiting; more are refused with 429."""
    max_queued: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Requests that wait because no worker has room; more are refused with 429."""
    queue_limit_s: _Seconds = 30.0
    """Seconds that a request waits for room before it is refused."""
    request_limit_s: _Seconds = 1800.0
    """Seconds after which a request ends with an error, wherever it is."""
    drain_limit_s: Annotated[float, Field(ge=0, le=3600)] = 120.0
    """Seconds that running requests get to finish after SIGTERM."""
    submit_limit_s: _Seconds = 2.0
    """Seconds that a worker has to accept or refuse; then another one is asked."""
    silence_s: _Seconds = 2.0
    """Seconds without a token after which the worker is asked for what may have been lost on the way."""
    lost_after_s: _Seconds = 3.0
    """Seconds without an answer after which a worker counts as lost, and its requests go on elsewhere."""
    step_limit_s: _Seconds = 30.0
    """Seconds without a finished step, while sequences run, after which a worker counts as lost."""
    body_limit: Size = 4 * 1024 * 1024
    """Largest request body, in bytes; larger ones are refused with 413."""
    body_limit_s: _Seconds = 30.0
    """Seconds in which a body must have arrived."""
    keep_alive_s: _Seconds = 15.0
    """Seconds of silence on a stream after which a comment is sent, so that proxies keep it open."""
    write_limit_s: _Seconds = 30.0
    """Seconds that a reader may leave a full buffer unread before it is cut."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Prompts tokenised at a time."""
    max_tokenizing: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Prompts that wait for the tokenizer or are in it; more are refused with 429."""

    def model_name(self) -> str:
        """Return the name under which the model answers, and by which its workers are known."""
        return self.model_names()[0]

    def model_names(self) -> tuple[str, ...]:
        """Return the names under which the model may be asked."""
        return self.served_model_name or (self.model.resolve().name,)
