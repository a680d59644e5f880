from __future__ import annotations

import io
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from shared.process.log import MAX_TEXT, _StandardHandler, configure, flush_log, get_logger, only_from
from shared.process.log_sink import LogSink
from tests.support.terminals import Terminal


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield
    flush_log(30.0)
    root.handlers[:], root.level = before[0], before[1]
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines_of(stream: io.StringIO) -> list[str]:
    flush_log(30.0)
    return stream.getvalue().splitlines()


def events_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(stream)]


def json_log(level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure("worker", "w0", level, "json", stream=stream)
    return stream


def test_a_json_event_has_the_common_fields_first_and_then_its_own() -> None:
    stream = json_log()
    get_logger(rid="r-1").info("model loaded", bytes=5, ratio=0.5, flag=True, nothing=None)
    (event,) = events_of(stream)
    assert list(event)[:5] == ["ts", "level", "service", "instance", "event"]
    assert event.pop("ts").endswith("Z")
    assert event == {
        "level": "info",
        "service": "worker",
        "instance": "w0",
        "event": "model loaded",
        "rid": "r-1",
        "bytes": 5,
        "ratio": 0.5,
        "flag": True,
        "nothing": None,
    }


def test_a_terminal_gets_a_readable_line_and_a_pipe_json() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    configure("worker", "w0", stream=terminal)
    get_logger().warning("low memory", left_bytes=12, why="two words", empty="", share=1 / 3)
    configure("worker", "w0", stream=pipe)
    get_logger().warning("low memory")
    (line,) = terminal.getvalue().splitlines()
    assert line[2::3][:2] == "::"
    assert line[12:] == ' WARNING worker w0  low memory  left_bytes=12 why="two words" empty="" share=0.333333'
    assert events_of(pipe)[0]["event"] == "low memory"


def test_events_below_the_level_are_dropped() -> None:
    stream = json_log("warning")
    get_logger().info("quiet")
    get_logger().warning("loud")
    assert [event["event"] for event in events_of(stream)] == ["loud"]


def test_bound_context_is_part_of_every_event() -> None:
    stream = json_log()
    with structlog.contextvars.bound_contextvars(epoch=3):
        get_logger().info("inside")
    get_logger().info("outside")
    inside, outside = events_of(stream)
    assert inside["epoch"] == 3
    assert "epoch" not in outside


def test_the_standard_library_takes_the_same_way() -> None:
    stream = json_log()
    logging.getLogger("nats.aio").warning("slow %s after %d", "consumer", 5)
    logging.getLogger("nats.aio").info("chatter of a library")
    (ours,) = [handler for handler in logging.getLogger().handlers if isinstance(handler, _StandardHandler)]
    ours.handle(logging.LogRecord("aiohttp", logging.ERROR, "x.py", 1, "wrong %d", ("arguments",), None))
    first, second = events_of(stream)
    assert (first["event"], first["level"], first["logger"]) == ("slow consumer after 5", "warning", "nats.aio")
    assert (first["service"], first["instance"]) == ("worker", "w0")
    assert second["event"] == "wrong %d"


def test_warnings_of_python_are_events_too() -> None:
    stream = json_log()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old thing", UserWarning, stacklevel=1)
        logging.captureWarnings(capture=False)
    assert "old thing" in events_of(stream)[0]["event"]


def test_an_exception_is_one_field_in_json_and_a_traceback_below_the_line_for_people() -> None:
    def raise_key_error() -> None:
        raise KeyError("lost")

    def fail_and_log() -> None:
        try:
            raise_key_error()
        except KeyError:
            get_logger().exception("failed")

    stream, terminal = json_log(), Terminal()
    fail_and_log()
    assert "KeyError: 'lost'" in events_of(stream)[0]["exception"]
    configure("worker", "w0", stream=terminal)
    fail_and_log()
    lines = lines_of(terminal)
    assert lines[0].endswith("failed")
    assert lines[1].startswith("Traceback")
    assert lines[-1] == "KeyError: 'lost'"


class Unprintable:
    def __str__(self) -> str:
        raise OSError("no words")


def test_values_that_json_does_not_know_become_text_and_never_an_error() -> None:
    stream = json_log()
    get_logger().info(
        "odd", a=Unprintable(), b=float("nan"), c=2**80, d={"x": object}, e="é\n\x1b[31m\udcff", f="x" * 9000
    )
    (event,) = events_of(stream)
    assert event["a"] == "<Unprintable that cannot be printed: OSError>"
    assert (event["b"], event["c"]) == ("nan", str(2**80))
    assert event["e"] == "é\n\x1b[31m\\udcff"
    assert event["f"] == f"{'x' * MAX_TEXT}… (9000 characters)"


def test_text_from_outside_cannot_forge_a_line_or_steer_the_terminal() -> None:
    terminal = Terminal()
    configure("worker", "w0", stream=terminal)
    get_logger().info("name\n12:00 ERROR", who="a\nb\x1b[2J")
    (line,) = lines_of(terminal)
    assert line.isprintable()


def test_a_closed_stream_raises_nothing() -> None:
    stream = io.StringIO()
    configure("worker", "w0", stream=stream)
    stream.close()
    get_logger().error("nobody listens")
    flush_log(30.0)
    configure("worker", "w0", stream=stream)
    get_logger().error("nobody listens")
    flush_log(30.0)


def test_a_pipe_whose_reader_is_gone_raises_nothing() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    stream = os.fdopen(write_end, "w")
    configure("worker", "w0", stream=stream)
    for _ in range(3):
        get_logger().error("nobody listens")
        flush_log(30.0)
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_before_it_is_configured_events_go_to_stderr_and_never_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    get_logger().info("early")
    get_logger().debug("too fine")
    flush_log(30.0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [json.loads(line)["event"] for line in captured.err.splitlines()] == ["early"]


class Stuck(io.StringIO):
    """A stream whose reader does not read until told."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        assert self.go_on.wait(30)
        return super().write(text)


def test_a_reader_that_stalls_blocks_no_caller_and_lost_lines_are_counted() -> None:
    stream = Stuck()
    sink = LogSink(stream, max_pending=10)
    sink.write("first")
    assert stream.entered.wait(30)  # the writer is stuck with the first line
    for number in range(25):
        sink.write(f"line {number}")  # returns although nothing is read
    assert sink.num_dropped == 15
    assert not sink.flush(0.0)
    stream.go_on.set()
    assert sink.flush(30)
    lines = stream.getvalue().splitlines()
    assert lines[:11] == ["first", *(f"line {number}" for number in range(10))]
    assert json.loads(lines[11])["count"] == 15
    assert sink.num_dropped == 0


def test_less_severe_events_are_dropped_within_the_block_only() -> None:
    stream, log = json_log(), get_logger()

    def say_three() -> None:
        log.info("dropped")
        get_logger(rid="r").warning("dropped as well")
        log.error("kept")
        raise ValueError("leaves the block")

    with pytest.raises(ValueError, match="leaves the block"), only_from("error"):
        say_three()
    log.info("after")
    assert [event["event"] for event in events_of(stream)] == ["kept", "after"]
