"""Frames of `sluice top`: what was seen and chosen in, lines out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.top import figures
from cli.top.controls import Controls
from cli.top.frame import Seen, render
from cli.top.look import Look
from cli.top.tables import REQUEST_ORDERS, WORKER_ORDERS
from cli.top.text import cut, pad, plain, width_of
from shared.api_keys import Tier
from shared.ids import DispatcherId, WorkerId
from shared.messages.fetch import FetchOutcome
from shared.messages.report import ClusterView, Liveness, WaitingRequests, WorkerPhase, WorkerReport, WorkerStatus
from shared.messages.report_parts import FetchCount, MigrationPart
from shared.open_requests import OpenCounts, OpenRequest, OpenRequests, RequestState
from tests.support.statuses import make_status, make_view

GIB = 1024**3
URL = "http://127.0.0.1:8000"


def make_row(number: int = 0, **fields: Any) -> OpenRequest:
    """A request of a reader who has text."""
    common: dict[str, Any] = {"tier": "default", "worker_id": "w0", "state": RequestState.STREAMING, "age_s": 4.0}
    common |= {"qoe": 1.0, "slack_s": 5.0, "num_output_tokens": 40, "num_prompt_tokens": 11}
    return OpenRequest(**{"id": f"cmpl-{number:032x}", **common, **fields})


def make_requests(*rows: OpenRequest, **fields: Any) -> OpenRequests:
    counts = [
        OpenCounts(tier=tier.label, **{state.value: _number(rows, tier, state) for state in RequestState})
        for tier in reversed(Tier)
    ]
    return OpenRequests(dispatcher_id=DispatcherId("d0"), counts=tuple(counts), requests=rows, **fields)


def _number(rows: tuple[OpenRequest, ...], tier: Tier, state: RequestState) -> int:
    return sum((row.tier, row.state) == (tier.label, state) for row in rows)


def see(view: ClusterView | None, requests: OpenRequests | None = None, **fields: Any) -> Seen:
    age_s = fields.pop("view_age_s", 0.2)
    return Seen(URL, Look("tiny", view, age_s, requests or make_requests()), **fields)


def shown(seen: Seen, controls: Controls | None = None, width: int = 80, height: int = 24, **options: Any) -> list[str]:
    return [plain(line) for line in render(seen, controls or Controls(), width, height, **options)]


def rows_of(lines: list[str], head: str) -> list[str]:
    """Return the lines of a table, up to a blank one or the keys."""
    (start,) = [number for number, line in enumerate(lines) if line.startswith(head)]
    found = []
    for line in lines[start + 1 :]:
        if not line or line.startswith("q quit"):
            break
        found.append(line)
    return found


def column(lines: list[str], head: str, title: str) -> list[str]:
    """Return what stands in a right-aligned column below its title."""
    (top,) = [line for line in lines if line.startswith(head)]
    end = re.search(rf"(?<![\w%/]){re.escape(title)}(?![\w%/])", top)
    assert end is not None, top
    return [line[: end.end()].split()[-1] for line in rows_of(lines, head)]


BUSY: dict[str, Any] = {"block_size": 16, "kv_bytes": 4 * GIB, "param_bytes": GIB // 2, "max_sequences": 64}


def test_what_a_cluster_has_is_told_in_gib_and_tokens() -> None:
    """Of 1 000 blocks of 16 tokens 300 are used: 4 800 of 16 000 tokens, 1.2 of 4 GiB; the other worker is idle."""
    first = make_status("w0", num_blocks=1000, num_used_blocks=300, num_running=8, num_waiting=2, qoe=0.97, **BUSY)
    second = make_status("w1", num_blocks=1000, num_used_blocks=0, tokens_per_s=12.34, **BUSY)
    lines = shown(see(make_view(first, second)))
    assert lines[0].startswith("sluice top  tiny  127.0.0.1:8000 ")
    assert lines[0].endswith(" live")
    assert lines[1] == "workers   2 of 2 ready  8 running  2 waiting  12.3 tokens/s"
    assert lines[2] == "memory    KV [||      ]  15%  1.20/8.00 GiB  4.8k/32.0k tokens  params 1.00 GiB"
    assert column(lines, "WORKER", "KV TOKENS") == ["4.8k/16.0k", "0/16.0k"]
    assert column(lines, "WORKER", "KV GIB") == ["1.20/4.00", "0/4.00"]
    assert column(lines, "WORKER", "QOE") == ["0.97", "-"]


def test_readers_are_told_with_qoe_and_slack() -> None:
    late = make_row(1, slack_s=-2.34, qoe=0.876, state=RequestState.PAUSED)
    plain_one = make_row(2, slack_s=None, qoe=None, state=RequestState.QUEUED, worker_id="", tier="flex")
    lines = shown(see(make_view(make_status("w0", qoe=0.9)), make_requests(make_row(0), late, plain_one, num_late=1)))
    assert "requests  3: 1 queued, 1 streaming, 1 paused  out of text: 1  QoE 0.90  at d0" in lines
    assert column(lines, "REQUEST", "SLACK") == ["-2.3s", "+5.0s", "-"]
    assert column(lines, "REQUEST", "QOE") == ["0.87", "1.00", "-"]
    assert "paused" in rows_of(lines, "REQUEST")[0]


def test_the_queue_is_told_by_tier_here_and_at_workers() -> None:
    waiting = (
        WaitingRequests(model="m", tier="default", num_requests=3, num_tokens=1200),
        WaitingRequests(model="m", tier="flex", num_requests=12, num_tokens=40_000),
    )
    view = make_view(make_status("w0", num_waiting=2)).model_copy(update={"waiting": waiting})
    expected = "queue     priority 0  default 3 (1.2k tok) + 2 at workers  flex 12 (40.0k tok)"
    assert expected in shown(see(view))
    newer = make_requests(waiting=(waiting[0].model_copy(update={"num_requests": 4}),))
    assert expected.replace("default 3", "default 4") in shown(see(view, newer))


def test_groups_and_moves_are_told() -> None:
    move = {
        "kind": "kv_exchange",
        "num_bytes": 8 * 2**20,
        "num_moved_bytes": 2**21,
        "bytes_per_s": 3 * 2**20,
        "elapsed_s": 1,
    }
    grouped: dict[str, Any] = {"group": "w0", "num_stages": 2, "plan_id": 17, "num_layers": 8}
    moved = MigrationPart(fetches_total=(FetchCount(reason="balance", outcome=FetchOutcome.MOVED, count=4),))
    leader = make_status("w0", stage=0, layers=(0, 4), moves=[move], migration=moved, **grouped)
    member = make_status("w1", stage=1, layers=(4, 8), num_preemptions_total=3, **grouped)
    lines = shown(see(make_view(leader, member, make_status("w2"))))
    assert "groups    w0 + w1 (plan 17)" in lines
    (first,) = [number for number, line in enumerate(lines) if line.startswith("moves")]
    assert lines[first].startswith("moves     KV exchange: w0: 25% of 8.0 MiB, 3.0 MiB/s after 1.0 s, 2.0 s left")
    assert lines[first + 1] == "          so far: 4 migrated, 3 preempted, 0 pauses"
    assert [row.split()[2:4] for row in rows_of(lines, "WORKER")][:2] == [["w0", "1/2"], ["w0", "2/2"]]


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (make_status(), "ready"),
        (make_status(phase=WorkerPhase.LOADING, progress_ratio=0.5), "load 50%"),
        (make_status(liveness=Liveness.DEAD), "dead 0.1s"),
        (make_status(liveness=Liveness.SUSPECT), "silent 0.1s"),
        (make_status(phase=WorkerPhase.DRAINING), "draining"),
        (make_status(held="a plan"), "held"),
        (make_status(is_leaving=True), "leaving"),
        (make_status(migration=MigrationPart(closing="emptied")), "closing"),
        (make_status(throttled=True), "throttled"),
        (make_status().model_copy(update={"incompatible": "9"}), "protocol 9"),
    ],
)
def test_a_worker_s_state_is_a_word(status: WorkerStatus, word: str) -> None:
    (row,) = rows_of(shown(see(make_view(status))), "WORKER")
    assert re.split(" {2,}", row)[1] == word


def test_a_cluster_without_workers_and_requests_is_said_to_be_empty() -> None:
    lines = shown(see(make_view()))
    assert lines[1] == "no worker reports to this cluster; start one with `sluice up`"
    assert rows_of(lines, "WORKER") == ["no worker reports"]
    assert rows_of(lines, "REQUEST") == ["nobody is served now"]


def test_a_cluster_whose_monitor_has_not_spoken_is_loading() -> None:
    lines = shown(see(None))
    assert lines[0].endswith(" loading")
    assert lines[1] == "the monitor has written no view yet; workers are shown once they report"


def test_old_data_is_said_to_be_stale_and_shown_dim() -> None:
    """The view was 9 s old when it was asked for, 3 s ago."""
    seen = see(make_view(make_status()), view_age_s=9.0, age_s=3.0)
    lines = shown(seen)
    assert lines[0].endswith(" stale, last data 12s ago")
    assert lines[1] == "the monitor is silent: what is shown of the workers is old"
    frame = render(seen, Controls(), 80, 24)
    assert {span.style for line in frame[2:-1] for span in line} == {"dim"}
    assert shown(see(make_view(make_status()), view_age_s=9.0, interval_s=10.0))[0].endswith(" live")


def test_a_server_that_is_gone_leaves_the_last_frame_dim_and_says_what_is_wrong() -> None:
    seen = see(make_view(make_status("w7")), age_s=12.0, trouble="nothing answers at X")
    lines = shown(seen)
    assert lines[0].endswith(" disconnected, last data 12s ago")
    assert lines[1] == "trying again every 1 s: nothing answers at X"
    assert rows_of(lines, "WORKER")[0].startswith("w7 ")
    assert {span.style for line in render(seen, Controls(), 80, 24)[2:-1] for span in line} == {"dim"}


def test_an_older_server_lists_no_requests() -> None:
    seen = Seen(URL, Look("tiny", make_view(make_status()), 0.1, None))
    assert "requests  this server lists no requests" in shown(seen)


def test_keys_change_what_is_sorted_and_how() -> None:
    """Slack 2, 1, 3; QoE 0.3, 0.2, 0.1; ages 1, 2, 3, which decides among equals; tokens 20, 30, 10."""
    rows = [
        make_row(number, slack_s=slack, qoe=qoe, age_s=age_s, num_output_tokens=out)
        for number, (slack, qoe, age_s, out) in enumerate([(2, 0.3, 1, 20), (1, 0.2, 2, 30), (3, 0.1, 3, 10)])
    ]
    seen, controls, orders = see(make_view(make_status()), make_requests(*rows)), Controls(), []
    for _ in REQUEST_ORDERS:
        lines = shown(seen, controls)
        orders.append((re.findall("s sort requests: (.*?)  ", lines[-1])[0], column(lines, "REQUEST", "OUT")))
        controls = controls.press("s")
    assert orders == [
        ("slack", ["30", "20", "10"]),
        ("qoe", ["10", "30", "20"]),
        ("age", ["10", "30", "20"]),
        ("out", ["30", "20", "10"]),
        ("tier", ["10", "30", "20"]),
    ]
    assert controls == Controls(), "after the last comes the first"
    lines = shown(seen, controls.press("r"))
    assert column(lines, "REQUEST", "OUT") == ["10", "20", "30"]
    assert "slack, reversed" in lines[-1]
    assert controls.press("x") == controls


def test_tab_has_the_keys_be_about_workers() -> None:
    statuses = [
        make_status(name, num_running=running, tokens_per_s=speed, num_blocks=10, num_used_blocks=used, qoe=qoe)
        for name, running, speed, used, qoe in (("a", 1, 5.0, 2, 0.5), ("b", 3, 1.0, 1, 0.4), ("c", 2, 9.0, 3, 0.9))
    ]
    seen, controls, orders = see(make_view(*statuses)), Controls().press("\t"), {}
    for order in WORKER_ORDERS:
        lines = shown(seen, controls)
        orders[order.title] = "".join(row[0] for row in rows_of(lines, "WORKER"))
        assert f"s sort workers: {order.title.lower()}  " in lines[-1]
        controls = controls.press("s")
    assert orders == {"WORKER": "abc", "KV%": "cab", "RUN": "bca", "TOK/S": "cab", "QOE": "bac"}
    assert Controls().press("\t").press("\t") == Controls()


def test_where_both_tables_find_no_room_the_chosen_one_has_more_of_it() -> None:
    seen = see(
        make_view(*(make_status(f"w{number:02}") for number in range(30))), make_requests(*map(make_row, range(40)))
    )
    on_readers, on_workers = shown(seen), shown(seen, Controls(on_workers=True))
    num = [(len(rows_of(lines, "WORKER")), len(rows_of(lines, "REQUEST"))) for lines in (on_readers, on_workers)]
    assert num[0][0] < num[0][1]
    assert num[1][0] > num[1][1] > 0
    assert [len(lines) for lines in (on_readers, on_workers)] == [24, 24]
    assert any(line.startswith(f"REQUEST {num[0][1]}/40 ") for line in on_readers)
    tall = shown(seen, height=100)
    assert (len(rows_of(tall, "WORKER")), len(rows_of(tall, "REQUEST"))) == (30, 40)


def test_more_width_has_more_columns_and_whole_names() -> None:
    status = make_status("w0", step_time_s=0.0123, num_blocks=9, qoe=1.0, group="w0", num_stages=2, **BUSY)
    seen = see(make_view(status), make_requests(make_row(7)))
    narrow, wide = shown(seen), shown(seen, width=160)
    assert f"cmpl-{7:032x}" in "\n".join(wide)
    assert rows_of(narrow, "REQUEST")[0].startswith("0000000000")
    assert column(wide, "WORKER", "STEP MS") == ["12.3"]
    assert "STEP MS" not in "\n".join(narrow)


def test_without_keys_the_frame_is_as_long_as_it_must_be() -> None:
    lines = shown(see(make_view(make_status())), height=10_000, has_keys=False)
    assert len(lines) < 20
    assert not any("quit" in line for line in lines)


def test_names_do_not_steer_the_terminal() -> None:
    evil = "a\x1b[2Jb\u202ec\nd"
    report = WorkerReport.model_construct(**{**make_status().report.__dict__, "worker_id": WorkerId(evil)})
    status = make_status().model_copy(update={"report": report})
    seen = Seen(URL, Look(evil, make_view(status), 0.1, make_requests(make_row(id=evil, tenant=evil))), trouble=evil)
    for line in render(seen, Controls(), 200, 40):
        assert plain(line).isprintable()


names = st.text(st.characters(codec="utf-8"), max_size=60)
counts = st.integers(0, 10**9)
ratios = st.floats(0, 1)


@st.composite
def any_seen(draw: st.DrawFn) -> Seen:
    """Clusters of a few workers and requests, with names and figures of any size."""
    statuses = [
        make_status(
            f"worker-{'x' * draw(st.integers(0, 60))}{number}",
            liveness=draw(st.sampled_from(Liveness)),
            throttled=draw(st.booleans()),
            num_blocks=draw(counts),
            num_used_blocks=draw(counts),
            block_size=draw(st.integers(0, 256)),
            kv_bytes=draw(counts) * 1000,
            num_running=draw(counts),
            num_waiting=draw(counts),
            tokens_per_s=draw(st.floats(0, 1e9)),
            qoe=draw(st.none() | ratios),
            group=draw(st.sampled_from(["", "worker-0"])),
            device=draw(names),
            held=draw(st.sampled_from(["", "a plan"])),
            slack_rows=draw(st.sampled_from([(), (3, 0, 0, 0, 0, 0, 0, 1)])),
        )
        for number in range(draw(st.integers(0, 12)))
    ]
    rows = [
        make_row(
            id=draw(names),
            tier=draw(st.sampled_from(["default", "flex", "priority"])),
            tenant=draw(names),
            state=draw(st.sampled_from(RequestState)),
            age_s=draw(st.floats(0, 1e9)),
            qoe=draw(st.none() | ratios),
            slack_s=draw(st.none() | st.floats(-1e9, 1e9)),
            num_output_tokens=draw(counts),
        )
        for _ in range(draw(st.integers(0, 12)))
    ]
    view = draw(st.sampled_from([None, make_view(*statuses), make_view(*statuses)]))
    last = Look(draw(names), view, draw(st.floats(0, 1e6)), draw(st.sampled_from([None, make_requests(*rows)])))
    return Seen(draw(names), last, draw(st.floats(0, 1e6)), draw(names), draw(st.floats(0.1, 3600)))


@settings(max_examples=60, deadline=None)
@given(any_seen(), st.integers(0, 200), st.integers(0, 60), st.text("sr\t", max_size=8))
def test_no_frame_is_wider_or_higher_than_the_terminal(seen: Seen, width: int, height: int, keys: str) -> None:
    controls = Controls()
    for key in keys:
        controls = controls.press(key)
    lines = render(seen, controls, width, height)
    assert len(lines) == height, "the keys are on the last line"
    assert all(sum(width_of(span.text) for span in line) <= width for line in lines)
    assert all(plain(line).isprintable() for line in lines)
    if height and width >= 80:
        assert plain(lines[-1]).startswith("q quit")


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("abcd", 0, ""),
        ("模型模型", 5, "模型…"),
        ("模型模型", 4, "模…"),
        ("e\u0301" * 4, 4, "e\u0301" * 4),
    ],
)
def test_text_is_cut_by_cells(text: str, width: int, expected: str) -> None:
    assert cut(text, width) == expected
    assert width_of(pad(text, width)) == width


@given(st.text(max_size=20), st.integers(0, 30), st.booleans())
def test_padded_text_takes_exactly_its_cells(text: str, width: int, is_right: bool) -> None:
    assert width_of(pad(text, width, is_right=is_right)) == width


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (99_949, "99.9k"), (99_951, "100k"), (999_600, "1.0M"), (2e9, "2.0G")],
)
def test_counts_take_few_cells(number: float, expected: str) -> None:
    assert figures.count(number) == expected


@pytest.mark.parametrize(
    ("time_s", "expected"),
    [(0.04, "0.0s"), (9.94, "9.9s"), (42.4, "42s"), (119.6, "2m00s"), (3661, "61m01s"), (7300, "2h01m"), (1e7, "115d")],
)
def test_times_take_few_cells(time_s: float, expected: str) -> None:
    assert figures.seconds(time_s) == expected
    assert figures.slack(-time_s).lstrip("+-") == expected


def test_a_qoe_is_perfect_only_if_it_is() -> None:
    assert [figures.quality(qoe) for qoe in (None, 1.0, 0.9999, 0.29)] == ["-", "1.00", "0.99", "0.29"]
