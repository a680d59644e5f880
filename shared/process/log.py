"""Structured events of one process on stderr: a readable line on a terminal, one JSON object per line otherwise.

    12:03:04.123 INFO  worker w0  model loaded  bytes=123 seconds=1.2
    {"ts": "2026-01-02T12:03:04.123Z", "level": "info", "service": "worker", "instance": "w0", "event": "model loaded"}

Records of the standard library's `logging` (aiohttp, nats) take the same way. A thread of its own does the writing,
from a bounded queue, so that a caller never waits for a slow reader of stderr and never sees an error when it is
closed; lines that do not fit are dropped and counted, and the count is logged when there is room again. Nothing is
logged by itself that holds what people wrote: whoever logs chooses the fields.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast

import structlog

from shared.process.log_sink import LogSink

Event = MutableMapping[str, Any]

MAX_TEXT: Final = 8192
"""Longest value of one field, in characters; a longer one is cut."""
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_HEAD: Final = ("ts", "level", "service", "instance", "event")


class _Installed:
    """The sink that `configure` installed last; one per process, like stderr itself."""

    sink: LogSink | None = None


def configure(
    service: str,
    instance_id: str,
    level: str = "info",
    format: str = "auto",  # noqa: A002 - the name of the setting
    *,
    stream: TextIO | None = None,
) -> None:
    """Send this process's events to stderr in one form. A second call replaces the first.

    Args:
        service: `worker`, `dispatcher`, …; a field of every event.
        instance_id: which process of that service; a field of every event.
        level: debug, info, warning or error; less severe events are dropped. Other libraries log from warning on,
            unless the level is debug.
        format: auto (human on a terminal, else json), human or json.
        stream: instead of stderr.
    """
    human = format == "human" or (format == "auto" and _is_terminal(sys.stderr if stream is None else stream))
    pipeline = _Pipeline(service, instance_id, _human_line if human else _json_line)
    sink = _install(pipeline, _LEVELS[level], stream)
    _take_standard_logging(pipeline, sink, _LEVELS[level])


def _install(pipeline: _Pipeline, level: int, stream: TextIO | None) -> LogSink:
    flush_log()
    sink = LogSink(stream)
    _Installed.sink = sink
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, pipeline],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_args: _LineLogger(sink),
        cache_logger_on_first_use=False,
    )
    return sink


def get_logger(**fields: Any) -> structlog.typing.FilteringBoundLogger:
    """Return a logger whose events carry these fields.

    Before `configure` (scripts, tests) events go to stderr as JSON from level info on; structlog's own default would
    write to stdout, and print the local variables of a traceback.
    """
    if not structlog.is_configured():
        _install(_Pipeline("sluice", "", _json_line), logging.INFO, None)
    return cast("structlog.typing.FilteringBoundLogger", structlog.get_logger(**fields))


@contextmanager
def only_from(level: str) -> Iterator[None]:
    """Drop events less severe than this within the block; for programs whose own output is what people want to see."""
    get_logger()
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]))
    try:
        yield
    finally:
        structlog.configure(wrapper_class=before)


def flush_log(timeout_s: float = 1.0) -> None:
    """Wait until the events logged so far are written, at most this long."""
    if _Installed.sink is not None:
        _Installed.sink.flush(timeout_s)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def _take_standard_logging(pipeline: _Pipeline, sink: LogSink, level: int) -> None:
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _StandardHandler):
            root.removeHandler(handler)
    root.addHandler(_StandardHandler(pipeline, sink))
    root.setLevel(level if level == logging.DEBUG else max(level, logging.WARNING))
    logging.captureWarnings(capture=True)


class _LineLogger:
    """What structlog calls at the end of its chain: every level writes the finished line."""

    def __init__(self, sink: LogSink) -> None:
        self._sink = sink

    def msg(self, line: str) -> None:
        self._sink.write(line)

    debug = info = warning = warn = error = critical = exception = fatal = log = msg


class _StandardHandler(logging.Handler):
    """Puts a record of the standard library through the same pipeline."""

    def __init__(self, pipeline: _Pipeline, sink: LogSink) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit the format
            text = str(record.msg)
        fields: Event = {"event": text, "level": record.levelname.lower(), "logger": record.name}
        if record.exc_info:
            fields["exc_info"] = record.exc_info
        self._sink.write(self._pipeline(None, "", fields))


class _Pipeline:
    """Last processor: adds the common fields, turns an exception into text, and renders the line. Never raises."""

    def __init__(self, service: str, instance_id: str, render: Callable[[Event], str]) -> None:
        self._service = service
        self._instance_id = instance_id
        self._render = render

    def __call__(self, _logger: Any, _method: str, fields: Event) -> str:
        common = {
            "ts": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": fields.pop("level", "info"),
            "service": fields.pop("service", self._service),
            "instance": fields.pop("instance", self._instance_id),
            "event": fields.pop("event", ""),
        }
        exception = _exception_text(fields.pop("exc_info", None))
        ordered = {**common, **fields, **({"exception": exception} if exception else {})}
        return self._render({str(key): _plain(value) for key, value in ordered.items()})


def _exception_text(exc_info: Any) -> str:
    if not exc_info:
        return ""
    if isinstance(exc_info, BaseException):
        exc_info = (type(exc_info), exc_info, exc_info.__traceback__)
    elif not isinstance(exc_info, tuple):
        exc_info = sys.exc_info()
    if exc_info[1] is None:
        return ""
    return logging.Formatter().formatException(exc_info)


def _plain(value: Any) -> Any:
    """Return the value as JSON carries it: numbers and booleans as they are, all else as text of bounded length."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and type(value) is int and abs(value) < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    try:
        text = str(value).encode(errors="backslashreplace").decode()  # half of a surrogate pair is no text
    except Exception as error:  # a broken __str__ must not break the caller
        text = f"<{type(value).__name__} that cannot be printed: {type(error).__name__}>"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}… ({len(text)} characters)"


def _json_line(fields: Event) -> str:
    return json.dumps(fields, ensure_ascii=False)


def _human_line(fields: Event) -> str:
    head = "{} {:<7} {} {}  {}".format(
        fields["ts"][11:23], str(fields["level"]).upper(), *(fields[key] for key in _HEAD[2:])
    )
    exception = fields.get("exception")
    rest = [f"{key}={_quoted(value)}" for key, value in fields.items() if key not in _HEAD and key != "exception"]
    line = "  ".join([_one_line(head), " ".join(rest)]).rstrip()
    return f"{line}\n{exception}" if exception else line


def _quoted(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else _one_line(str(value))
    return json.dumps(text, ensure_ascii=False) if " " in text or not text else text


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
