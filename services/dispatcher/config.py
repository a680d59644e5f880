"""Settings of one dispatcher process: flag > environment > sluice.toml > default (`shared.process.config`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

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
)
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
    reasoning_parser: ReasoningParser = "auto"
    """How the model's thinking is told from what it says: auto (qwen3 if the chat template knows `</think>`), none (not
    at all), qwen3 (it begins with `<think>`, of the answer or at the end of the prompt), or deepseek_r1 (every answer
    begins with it, unless the prompt has ended it)."""
    tool_parser: ToolParser = "auto"
    """How the model's calls of tools are found in its answers: auto (by its chat template), none (requests with tools
    are refused), or the form of a family of models: hermes (Qwen's too), llama3, mistral or phi."""
    system: str = DEFAULT_SYSTEM
    """Named set of policies (`shared.systems`)."""
    host: Host = "127.0.0.1"
    """Address to listen on; another one than this machine's own needs keys, or `allow_no_key`."""
    published_host: Host | None = None
    """Address at which a container's engine publishes what listens at `host`; it then decides whether keys are needed.
    Empty: `host` itself."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 takes a free one."""
    api_keys_file: Path | None = None
    """File of keys (`sluice keys create`); read again when it changes. With it, or `api_key`, requests need a key."""
    api_keys_kept: Path | None = None
    """Where a copy of the last good `api_keys_file` is kept, so that one that is wrong changes nothing for a dispatcher
    that starts again; a folder that lasts as long as that. Empty: nowhere, and such a start lets nobody in."""
    api_key: ApiKey = ""
    """One key that may infer and read metrics, of 16 characters at least; better given as a variable than as a flag."""
    allow_no_key: bool = False
    """Listen on another address than this machine's own although the API asks for no key."""
    allow_host: HostNames = ()
    """Names, with commas, by which the API may be asked without keys, besides `host`, addresses and localhost."""
    allow_origin: Origins = ()
    """Origins, with commas, whose pages may use the API from a browser (`https://chat.example`); `*` with keys only."""
    max_requests: Annotated[int, Field(ge=1, le=65_536)] = 4096
    """Requests at a time, running and waiting; more are refused with 429. Best effort is not among them."""
    max_choices: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Choices of one request over all its prompts; one that asks for more is refused with 400."""
    max_queued: Annotated[int, Field(ge=1, le=65_536)] = 1024
    """Requests that wait because no worker has a place for them; more are refused with 429."""
    max_queued_flex: Annotated[int, Field(ge=1, le=1_048_576)] = 50_000
    """The same of best effort (`flex`), which waits apart, for as long as a request may take."""
    flex_memory: Annotated[Size, Field(ge=1024 * 1024)] = 1024 * 1024 * 1024
    """Bytes of best effort's prompts that wait; when they are more, further ones are refused with 429."""
    queue_limit_s: _Seconds = 30.0
    """Seconds that a request waits for room before it is refused; best effort waits until `request_limit_s`."""
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
    step_limit_s: _Seconds = 10.0
    """Seconds without a finished step, while sequences could run, after which a worker counts as lost."""
    max_connections: Annotated[int, Field(ge=1, le=1_048_576)] = 16_384
    """Connections at a time; more are turned away with 503. Fewer if the system grants fewer open files. A quarter of
    them, as of an address's, is not for best effort."""
    max_connections_per_address: Annotated[int, Field(ge=1, le=1_048_576)] = 4096
    """Connections at a time of one IPv4 address or one IPv6 network (/64); more are turned away with 429."""
    head_limit_s: _Seconds = 10.0
    """Seconds in which a request's headers must arrive, from the connection on, or from their first byte on."""
    head_limit: Annotated[Size, Field(ge=1024, le=1024 * 1024)] = 8192
    """Largest request line and headers together, in bytes; larger ones are refused with 431."""
    idle_limit_s: _Seconds = 75.0
    """Seconds that a connection stays open between two requests."""
    body_limit: Size = 4 * 1024 * 1024
    """Largest request body, in bytes; larger ones are refused with 413."""
    body_limit_s: _Seconds = 30.0
    """Seconds in which a body must have arrived."""
    keep_alive_s: _Seconds = 15.0
    """Seconds of silence on a stream after which a comment is sent, so that proxies keep it open."""
    write_limit_s: _Seconds = 30.0
    """Seconds for which a reader may take nothing of what waits for it before it is cut."""
    max_unsent: Size = 8 * 1024 * 1024
    """Bytes of one stream that may wait for its reader; one that has more waiting is cut at once."""
    tokenizer_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Prompts tokenised at a time."""
    max_tokenizing: Annotated[int, Field(ge=1, le=65_536)] = 512
    """Prompts that wait for the tokenizer or are in it, and long bodies that are to be read; more get 429."""

    @property
    def reached_at(self) -> str:
        """The address at which others find the API."""
        return self.published_host or self.host

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return self.api_keys_file is not None or bool(self.api_key)

    def model_name(self) -> str:
        """Return the name under which the model answers, and by which its workers are known."""
        return self.model_names()[0]

    def model_names(self) -> tuple[str, ...]:
        """Return the names under which the model may be asked."""
        return self.served_model_name or (self.model.resolve().name,)
