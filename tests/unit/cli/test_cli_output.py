"""What the person sees: help, tables, progress, hints."""

from __future__ import annotations

import ast
import errno
import io
import json
import os
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from cli import main as command
from cli import status
from cli.answer import printable
from cli.cluster.broker import BrokerAccess
from cli.cluster.children import ClusterPlan
from cli.cluster.hints import describe
from cli.cluster.progress import StartProgress, bar
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.exit_codes import CommandError
from cli.http import HttpAnswer
from cli.model import Model
from cli.status import render
from shared.ids import WorkerId
from shared.messages.report import ClusterView, Liveness, WaitingRequests, WorkerPhase, WorkerReport
from shared.messages.report_parts import MigrationPart
from shared.subjects import Subjects
from shared.transport.memory_bus import MemoryBroker
from shared.wire import encode_json
from tests.support.statuses import make_report, make_status, make_view
from tests.support.terminals import Terminal
from tests.unit.cli.conftest import Refusal
from tests.unit.golden.samples import MESSAGES

BY_ENVIRONMENT = ("nats_user", "nats_password", "nats_password_file", "nats_replicas")
"""What a broker of one's own asks for: a password among flags is seen by everybody on the machine."""


def output_of(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = command.run_command(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_lists_every_command_with_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output_of(capsys, "--help")
    assert code == 0
    for text in (*command.cli.commands, "Examples:", "sluice demo", "Exit codes:", "130", "NO_COLOR", "NATS_URL"):
        assert text in out
    commands = "up demo chat status bench profile pull keys tap nats-config chaos simulate compare plan replay version"
    more = (
        "top doctor explain drain drop restore planner nats-setup ps down logs run serve stop ls list models completion"
    )
    assert set(command.cli.commands) == {*commands.split(), *more.split()}
    in_sections = " ".join(command.SECTIONS.values()).split()
    others = {name for name, each in command.cli.commands.items() if each.hidden}
    assert sorted([*in_sections, *others]) == sorted(command.cli.commands), "each is in one section"
    for title in command.SECTIONS:
        assert f"\n{title}:\n" in out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_is_told_how_to_complete(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output_of(capsys, "completion", shell)
    assert code == 0
    assert f"_SLUICE_COMPLETE={shell}_complete" in out


def test_words_are_completed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_SLUICE_COMPLETE", "bash_complete"), ("COMP_WORDS", "sluice lo"), ("COMP_CWORD", "1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        command.cli.main(prog_name="sluice")
    assert capsys.readouterr().out == "plain,logs\n"


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys)[:2] == output_of(capsys, "--help")[:2]


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(errno.EMFILE, 2, "ulimit -n"), (errno.ENFILE, 1, "fs.file-max"), (errno.ENOSPC, 1, "no room on the disk")],
)
def test_what_a_machine_lacks_is_one_line(
    number: int, code: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.keys.make_key", Mock(side_effect=OSError(number, os.strerror(number))))
    found, _, err = output_of(capsys, "keys", "create", "--tenant", "me")
    assert (found, err.count("\n")) == (code, 1)
    assert words in err


def test_up_has_a_flag_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output_of(capsys, "up", "--help")
    not_for_up = {"instance_id", "log_format", "health_file", *BY_ENVIRONMENT}
    for name in set(UpSettings.model_fields) - not_for_up:
        assert f"--{name.replace('_', '-')}" in out
    assert "--json" in out
    assert "[auto]" in out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["nonsense"], "sluice: No such command 'nonsense'. See `sluice --help`\n"),
        (["up", "--port"], "sluice: Option '--port' requires an argument. See `sluice up --help`\n"),
        (["up", "--port", "x"], "sluice: --port: 'x' is not allowed. Use a whole number from 0 to 65535\n"),
        (
            ["bench", "--scale", "nan"],
            "sluice: Invalid value for '--scale': 'nan' is not allowed here. See `sluice bench --help`\n",
        ),
        (
            ["bench", "--vocab", "9"],
            "sluice: --vocab sends token ids, which only --endpoint completions takes. See `sluice bench --help`\n",
        ),
        (
            ["drop", "--workers", "w0"],
            (
                "sluice: Invalid value for '--workers': a group takes two workers at least, with a comma between them. "
                "See `sluice drop --help`\n"
            ),
        ),
        (["restore", "w0"], "sluice: Got unexpected extra argument (w0). See `sluice restore --help`\n"),
        (["chat", "one", "more"], "sluice: Got unexpected extra argument (more). See `sluice chat --help`\n"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(refusal: Refusal, argv: list[str], line: str) -> None:
    assert refusal(*argv) == line


@pytest.mark.parametrize("name", ["chat", "status", "top", "bench"])
def test_nothing_at_the_url_is_exit_code_3_and_one_line(refusal: Refusal, name: str) -> None:
    said = refusal(name, "--url", "http://127.0.0.1:1", code=3)
    assert said.startswith("sluice: nothing ")
    assert "`sluice up`" in said


@pytest.mark.parametrize("name", ["chat", "status", "top", "bench"])
@pytest.mark.parametrize("url", ["notaurl", "127.0.0.1:8000", "ftp://host", "http://", "http://[::1", "http://host:x"])
def test_a_url_that_is_none_is_bad_usage(refusal: Refusal, name: str, url: str) -> None:
    assert refusal(name, "--url", url) == f"sluice: '{url}' is no URL. Use --url http://127.0.0.1:8000\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "version")[:2] == (0, "sluice 0.1.0\n")


def test_a_question_keeps_its_mark_before_the_next_step() -> None:
    assert str(CommandError("did you mean 'x'?", "See y.")) == "sluice: did you mean 'x'? See y"
    assert str(CommandError("gone.\n")) == "sluice: gone"


def test_what_waits_in_dispatchers_is_said_by_tier_and_model() -> None:
    rows = [
        WaitingRequests(model="m", tier=tier, num_requests=n, num_tokens=9) for tier, n in (("default", 7), ("flex", 2))
    ]
    assert "waiting in dispatchers: 7 default of m, 2 flex of m" in render(
        make_view(make_status()).model_copy(update={"waiting": tuple(rows)})
    )
    assert "waiting" not in render(make_view(make_status()))


def test_workers_that_the_monitor_has_no_room_for_are_told_of() -> None:
    view = make_view(make_status()).model_copy(update={"num_left_out": 3})
    assert "left out: 3 more workers report, for which the monitor has no room" in render(view)


def test_status_says_who_leaves_and_who_stands_still() -> None:
    closing = make_status("w2", migration=MigrationPart(closing="w2 is emptied; w1 has room"))
    told = render(make_view(make_status("w0", is_leaving=True), make_status("w1", held="a plan"), closing))
    assert "leaving: w0: told to stop; the planner restores its group first" in told
    assert "held: w1: a plan" in told
    assert "closing: w2 is emptied; w1 has room; it takes no new requests" in told
    assert (told.count("leaving:"), told.count("held:")) == (1, 1)


def test_the_status_table_shows_every_worker() -> None:
    busy = make_status(
        "worker-0",
        num_blocks=200,
        num_used_blocks=50,
        num_running=3,
        num_waiting=1,
        num_preempted=1,
        tokens_per_s=12.34,
        num_steps=9,
    )
    loading = make_status("worker-1", liveness=Liveness.DEAD, phase=WorkerPhase.LOADING, progress_ratio=0.5)
    late = loading.model_copy(update={"age_s": 7.2})
    head, first, second, blank, summary = render(make_view(busy, late)).splitlines()
    assert head.split()[:3] == ["WORKER", "PHASE", "LIVENESS"]
    assert first.split() == ["worker-0", "ready", "alive", "-", "-", "50/200", "(25%)", "3", "2", "12.3", "9"]
    assert second.split()[:5] == ["worker-1", "loading", "50%", "dead", "(7"]
    assert blank == ""
    assert summary == "1 of 2 workers can take requests; 3 running, 12.3 tokens/s"


def test_the_status_table_shows_host_memory_where_a_worker_has_some() -> None:
    with_some: dict[str, Any] = {
        "num_host_blocks": 4096,
        "num_used_host_blocks": 99,
        "num_brought_back_tokens_total": 6400,
    }
    totals: dict[str, Any] = {"num_recomputed_tokens_total": 640, "num_given_up_tokens_total": 16}
    shown = render(make_view(make_status("w0", **with_some, **totals), make_status("w1"))).splitlines()
    assert [line.split("  ")[-1].strip() for line in shown[:3]] == ["HOST KV", "99/4096", "-"]
    assert shown[5:] == ["left the device: w0: 6400 tokens brought back, 640 computed again, 16 given up"]
    for word in ("HOST KV", "gave way"):
        assert word not in render(make_view(make_status("w1")))
    again = render(make_view(make_status("w1", num_recomputed_tokens_total=3)))
    assert again.endswith("left the device: w1: 0 tokens brought back, 3 computed again")
    gave = render(make_view(make_status("w1", num_preemptions_total=2)))
    assert gave.endswith("left the device: w1: 2 preemptions, 0 tokens brought back, 0 computed again")
    paused = render(make_view(make_status("w0"), make_status("w1", num_pauses_total=7))).splitlines()
    assert paused[-1] == "paused: w1: 7 times a sequence kept its KV and sat out steps"


def test_the_status_table_says_what_readers_have_where_some_read() -> None:
    read = make_status("w0", qoe=0.98765, slack_rows=(2, 0, 1, 0, 0, 0, 0, 4))
    waits = make_status("w1", qoe=0.5, slack_rows=(0,) * 8)
    gone = make_status("w2", qoe=0.5, liveness=Liveness.DEAD)
    shown = render(make_view(read, waits, gone, make_status("w3"))).splitlines()
    assert [line for line in shown if line.startswith("readers")] == [
        "readers: w0: QoE 0.988 by now; 2 of 7 that run are out of text",
        "readers: w1: QoE 0.500 by now",
    ]


def test_the_status_table_has_a_line_for_each_tier_once_somebody_uses_another_than_the_default() -> None:
    """Of w1, which names none, all is of the default tier; w2 is gone."""
    tiers = [
        {"tier": "default", "num_running": 1, "num_waiting": 1, "num_used_blocks": 10},
        {"tier": "flex", "num_running": 2, "num_waiting": 0, "num_used_blocks": 30},
    ]
    counts: dict[str, Any] = {"num_blocks": 100, "num_running": 3, "num_used_blocks": 40}
    mixed = make_status("w0", num_waiting=1, tiers=tiers, **counts)
    plain = make_status("w1", num_preempted=2, **counts)
    gone = make_status("w2", tiers=tiers, liveness=Liveness.DEAD, **counts)
    shown = render(make_view(mixed, plain, gone)).splitlines()
    assert shown[-2:] == [
        "default: 4 running, 3 waiting at workers, 50 KV blocks (25%)",
        "flex: 2 running, 0 waiting at workers, 30 KV blocks (15%)",
    ]
    assert not [line for line in render(make_view(plain, gone)).splitlines() if line.startswith(("default", "flex"))]


def test_the_status_table_shows_groups_where_parameters_can_be_dropped() -> None:
    common: dict[str, Any] = {"num_layers": 8, "elastic": MESSAGES["worker_report"].model_dump()["elastic"]}
    grouped: dict[str, Any] = {"group": "w0", "num_stages": 2, "plan_id": 17, **common}
    exchange_now = {
        "kind": "kv_exchange",
        "num_bytes": 8 * 2**20,
        "num_moved_bytes": 2 * 2**20 - 1,
        "bytes_per_s": 3 * 2**20,
        "elapsed_s": 0.66,
        "num_waiting": 5,
        "mode": "live",
        "sources": ["w2", "w0"],
    }
    load_now = {
        "kind": "parameter_load",
        "num_bytes": 2**31,
        "num_moved_bytes": 2**31,
        "bytes_per_s": 2**30,
        "elapsed_s": 2,
    }
    first, second, third, fourth = (
        make_status("w0", layers=(0, 4), stage=0, num_coming_blocks=12, moves=[exchange_now], **grouped),
        make_status("w1", layers=(4, 8), stage=1, moves=[load_now], **grouped),
        make_status("w2", layers=(0, 8), **common),
        make_status("w3"),
    )
    short = third.model_copy(update={"throttled": True, "throttled_reason": "11 of 10 KV blocks wanted"})
    shown = render(make_view(first, second, short, fourth))
    head, *rows, blank, summary, throttled, exchange, load = shown.splitlines()
    assert head.split()[-4:] == ["GROUP", "STAGE", "LAYERS", "PLAN"]
    cells = [row.split("  ") for row in rows]
    assert [[cell.strip() for cell in row if cell.strip()][-4:] for row in cells] == [
        ["w0", "1 of 2", "0 to 3 of 8", "17"],
        ["w0", "2 of 2", "4 to 7 of 8", "17"],
        ["-", "-", "0 to 7 of 8", "-"],
        ["-", "-", "-", "-"],
    ]
    assert blank == ""
    assert summary.startswith("3 of 4 workers can take requests"), "nothing is placed on a member"
    assert throttled == "throttled: w2: 11 of 10 KV blocks wanted"
    assert exchange == (
        "KV exchange: w0: 24% of 8.0 MiB from w2, w0, 3.0 MiB/s after 0.7 s, 2.0 s left, live, "
        "5 requests wait for theirs"
    )
    assert load == "parameter load: w1: 100% of 2.0 GiB, 1.0 GiB/s after 2.0 s"


@pytest.mark.parametrize(
    ("layers", "resident", "ratio", "shown"),
    [
        ((0, 4), (0, 0), 1.0, "0 to 3 of 8"),
        ((0, 4), (0, 4), 1.0, "0 to 3 of 8"),
        ((0, 4), (0, 8), 0.629, "0 to 3 of 8, loading 62%"),
        ((0, 4), (0, 8), 0.9999, "0 to 3 of 8, loading 99%"),
        ((0, 4), (0, 8), 1.0, "0 to 3 of 8, all loaded"),
        ((0, 8), (0, 8), 1.0, "0 to 7 of 8"),
    ],
)
def test_the_status_table_shows_how_far_a_load_beside_serving_is(
    layers: tuple[int, int], resident: tuple[int, int], ratio: float, shown: str
) -> None:
    one = make_status("w0", num_layers=8, layers=layers, resident=resident, loaded_ratio=ratio, group="w0", plan_id=17)
    assert render(make_view(one)).splitlines()[1].split("  ")[-2:] == [shown, "17"]


def test_a_view_of_a_silent_monitor_is_marked_as_stale() -> None:
    view = make_view(make_status())
    assert render(view, 12.3).splitlines()[-1] == "stale: the monitor wrote this 12 s ago"
    assert "stale" not in render(view, 0.4)


UNKNOWN = "describes its cluster in an unknown way"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        *((body, UNKNOWN) for body in (b"<html>", b"[" * 100_000, b"5", b"{}", b"\xff")),
        (b'{"workers": [], "age_s": null}', r"does not know its cluster yet\. The monitor has written no view yet"),
    ],
)
async def test_what_is_no_view_of_a_cluster_is_one_line(
    monkeypatch: pytest.MonkeyPatch, body: bytes, said: str
) -> None:
    monkeypatch.setattr(status, "ask", AsyncMock(return_value=HttpAnswer(200, body)))
    with pytest.raises(CommandError, match=said):
        await status.run_status("http://x", as_json=False)


def test_an_empty_cluster_is_said_in_words() -> None:
    assert "no worker reports" in render(ClusterView(sequence_number=0))


def test_the_snippets_can_be_pasted() -> None:
    prompt = 'Say "it\'s $HOME" twice'
    plan = ClusterPlan(UpSettings(), Model(Path(), "m"), BrokerAccess("nats://127.0.0.1:4"), 8000, Path())
    text = describe(Console(io.StringIO(), {}), plan, prompt)
    _, curl, python = text.strip().split("\n\n", 2)
    words = shlex.split(curl)
    assert words[0] == "curl"
    assert json.loads(words[-1])["messages"] == [{"role": "user", "content": prompt}]
    assert prompt in {node.value for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Constant)}


def test_a_shell_does_not_take_the_brackets_of_an_address_for_a_pattern() -> None:
    plan = ClusterPlan(UpSettings(host="[::1]"), Model(Path(), "m"), BrokerAccess("nats://127.0.0.1:4"), 8000, Path())
    text = describe(Console(io.StringIO(), {}), plan)
    for words in ("curl -N ", "sluice status --url ", "sluice chat --url "):
        assert f"{words}'http://[::1]:8000" in text


@pytest.mark.parametrize(("ratio", "cells"), [(-1, "...."), (0, "...."), (0.49, "#..."), (1, "####"), (2, "####")])
def test_bars_never_overflow(ratio: float, cells: str) -> None:
    assert bar(ratio, 4) == f"[{cells}]"


def test_without_a_terminal_there_is_neither_bar_nor_colour() -> None:
    stream = io.StringIO()
    console = Console(stream, {})
    console.show_status("12 %")
    console.line(console.style("ready", "green"))
    console.end_status()
    assert stream.getvalue() == "ready\n"


def test_no_color_keeps_the_live_line_and_drops_colours() -> None:
    stream = Terminal()
    console = Console(stream, {"NO_COLOR": "1"})
    console.show_status("12 %")
    console.line(console.style("ready", "green"))
    console.end_status()
    assert stream.getvalue() == "\r\x1b[K12 %\r\x1b[Kready\n12 %\r\x1b[K"
    assert Console(Terminal(), {}).style("x", "green") == "\x1b[32mx\x1b[0m"


def test_a_closed_stream_does_not_stop_the_cluster() -> None:
    Console(stream=_Closed(), env={}).line("text")


class _Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


async def test_progress_is_a_line_now_and_then_about_who_is_last_and_ends_when_all_are_ready() -> None:
    stream = io.StringIO()
    progress = StartProgress(["worker-0", "worker-1"], Console(stream, {}))
    bus = MemoryBroker(latency_s=0.0).connect("test")
    await progress.listen(bus, Subjects())

    async def hear(elapsed_s: float, *reports: WorkerReport) -> None:
        for item in reports:
            await bus.publish(Subjects().report(item.worker_id), encode_json(item))
        await bus.publish(Subjects().report(WorkerId("worker-0")), b"garbage")
        await bus.flush()
        progress.show(elapsed_s)

    loading = {"phase": WorkerPhase.LOADING, "progress_ratio": 0.6, "progress_text": "read"}
    await hear(1.0, make_report("worker-0", **loading))
    await hear(5.0, make_report("worker-0"))
    await hear(9.9, make_report("worker-1", **loading))
    await hear(10.0)
    before = progress.all_ready
    await hear(16.0, *map(make_report, ("worker-0", "stranger", "worker-1")))
    assert (before, progress.all_ready) == (False, True)
    assert stream.getvalue().splitlines() == [
        "  5.0 s  1 of 2 workers ready; worker-1 starting",
        " 10.0 s  1 of 2 workers ready; worker-1 60% read",
    ]
    await bus.close()


def test_what_a_model_writes_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2J\x07b\n\tc\x9b31m é 日本") == "a[2Jb\n\tc31m é 日本"
