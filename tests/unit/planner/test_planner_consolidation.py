"""Who gives which requests to whom so that few workers are in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from services.planner.policy.moves import Wanted, WantedMove, move_rate
from services.planner.policy.packing.consolidation import (
    DECISION_S,
    EMPTY_HORIZON_S,
    MOVE_S,
    Consolidation,
    Emptying,
    Relief,
    free_blocks,
    grown_blocks,
    lacking_blocks,
    move_s,
)
from services.planner.policy.packing.pack import EMPTY_PERIOD_S, NUM_EMPTIEST
from shared.ids import RequestId, WorkerId
from shared.messages.fetch import FetchReason, RunningPart
from shared.messages.report import ClusterView, WorkerReport, WorkerStatus
from shared.messages.report_parts import DecodeCost, MigrationPart, SharedPrefix
from shared.systems import PACKED_STEP_S
from tests.support.statuses import make_report, make_status, make_view

NUM_BLOCKS = 1000
RATES = ("a", 150e6), ("b", 50e6)
COMMON: dict[str, Any] = {
    "num_blocks": NUM_BLOCKS,
    "block_size": 16,
    "model_digest": "m",
    "stage_address": "a",
    "step_time_s": 1 / 16,
}


def busy(name: str, used: int, rows: int = 2, **fields: Any) -> WorkerStatus:
    """A worker whose rows grow by a block per second each, unless it says otherwise."""
    pace = {"num_used_blocks": used, "num_running": rows, "tokens_per_s": 16.0 * rows}
    return make_status(name, **(COMMON | pace | fields))


def unused(name: str) -> WorkerStatus:
    return make_status(name, **COMMON)


def part(name: str, num_blocks: int, num_choices: int = 1, prefix: str = "", num_shared: int = 0) -> RunningPart:
    choices = tuple((RequestId(f"{name}-{number}"), 1) for number in range(num_choices))
    return RunningPart(
        choices=choices,
        num_tokens=16 * num_blocks,
        num_blocks=num_blocks,
        num_held_blocks=num_blocks + num_shared,
        prefix=prefix,
        num_prefix_blocks=num_shared,
    )


def wanted_of(view: ClusterView, now_s: float = 0.0, *avoided: tuple[str, str]) -> Sequence[Wanted]:
    named = {(WorkerId(source), WorkerId(target)) for source, target in avoided}
    return Consolidation()(view, named, now_s)


def told(moves: Sequence[WantedMove]) -> list[tuple[str, str]]:
    return [(move.part.choices[0][0].rpartition("-")[0], move.target.worker_id) for move in moves]


def only_relief(*statuses: WorkerStatus) -> Relief:
    (found,) = [each for each in wanted_of(make_view(*statuses)) if isinstance(each, Relief)]
    return found


def test_a_worker_will_lack_memory_when_what_runs_outgrows_it_before_a_move_could_end() -> None:
    """Two rows of a block per second: in 4 s each needs five blocks, rounded up."""
    assert DECISION_S + MOVE_S == 4.0
    report = busy("w", 995).report
    assert grown_blocks(report, 2, DECISION_S + MOVE_S) == 10
    assert lacking_blocks(report) == 5
    assert lacking_blocks(busy("w", 990).report) == 0
    assert lacking_blocks(busy("w", 900, num_demanded_blocks=95).report) == 5
    assert lacking_blocks(busy("w", 900, num_uncomputed_blocks=95).report) == 5


def test_how_long_a_move_takes_is_what_moves_took() -> None:
    """Four requests of 200 blocks of a megabyte."""
    fast, slow = (busy(name, 800, 4, kv_bytes=10**9, migration=MigrationPart(bytes_per_s=rate)) for name, rate in RATES)
    none = busy("c", 0, rows=0)
    assert move_rate([fast.report, slow.report, none.report]) == 75e6, "two bytes in 1/150 and 1/50 µs"
    assert move_rate([none.report]) == 0.0
    assert move_s(fast.report, 100e6) == 2.0
    tokens = [fast.report.model_copy(update={"token_s": token_s}) for token_s in (1e-4, 2e-3)]
    assert [move_s(report, 100e6) for report in tokens] == [2.0, 2.0], "as KV"
    assert [move_s(report, 10e6) for report in tokens] == pytest.approx([3.0, 6.4]), "3 200 tokens"
    assert move_s(fast.report, 0.0) == move_s(none.report, 100e6) == MOVE_S
    assert [lacking_blocks(busy("w", 986, 2, kv_bytes=10**9).report, rate) for rate in (0.0, 1e9, 1e8)] == [-4, -8, 2]


def test_it_gives_the_smallest_request_that_leaves_it_room_to_the_fullest_worker_in_use_that_has_room() -> None:
    """Of two rows one stays, which grows by 11 blocks in ten seconds: ten have to go."""
    relief = only_relief(busy("full", 999), busy("a", 500), busy("b", 700), busy("c", 930), unused("u"))
    running = [part("large", 500), part("tiny", 9), part("fits", 10)]
    assert relief.source.worker_id == "full"
    assert relief.reason is FetchReason.PACK
    (move,) = relief.choose(running)
    assert told([move]) == [("fits", "c")]
    assert relief.tell(move) == "full will lack 9 KV blocks; c has room"


def test_where_nobody_in_use_has_room_it_gives_to_the_last_that_is_not_in_use() -> None:
    """Dispatchers take the first."""
    relief = only_relief(busy("full", 999), busy("a", 900), unused("u1"), unused("u0"))
    assert told(relief.choose([part("fits", 100), part("other", 899)])) == [("fits", "u1")]


def test_if_no_request_is_large_enough_the_largest_goes_and_one_that_is_alone_stays() -> None:
    relief = only_relief(busy("full", 999, rows=30), busy("a", 100))
    assert told(relief.choose([part("x", 20), part("y", 30)])) == [("y", "a")]
    assert relief.choose([]) == ()
    alone = only_relief(busy("full", 999, rows=1), busy("a", 100))
    assert alone.choose([part("alone", 100)]) == ()
    nowhere = only_relief(busy("full", 999), busy("a", 960))
    assert nowhere.choose([part("x", 100), part("y", 900)]) == ()


def test_where_nobody_has_room_for_long_it_gives_what_fits_to_where_there_is_most_of_it() -> None:
    """Four seconds are room enough then; one that is enough is taken before larger ones, and these before smaller."""
    others = busy("a", 975), busy("b", 968), busy("c", 972)
    relief = only_relief(busy("full", 999), *others)
    assert told(relief.choose([part("larger", 16), part("enough", 12)])) == [("enough", "b")]
    assert told(relief.choose([part("large", 500), part("some", 9), part("less", 8)])) == [("some", "b")]
    assert told(relief.choose([part("large", 500)])) == []
    resting = only_relief(busy("full", 999), busy("b", 957))
    assert told(resting.choose([part("enough", 12), part("rests", 9)])) == [("rests", "b")]


@pytest.mark.parametrize(("used", "fits"), [(857, True), (858, False)])
def test_a_target_has_room_for_what_all_there_grow_by_in_ten_seconds(used: int, *, fits: bool) -> None:
    """Two rows there and one that comes, 11 blocks each, and 110 that it has."""
    relief = only_relief(busy("full", 999), busy("a", used), unused("u"))
    assert told(relief.choose([part("x", 110), part("y", 889)])) == [("x", "a" if fits else "u")]


def test_a_pair_that_rests_and_workers_of_other_models_take_no_part() -> None:
    view = make_view(busy("full", 999), busy("a", 500), busy("b", 400), busy("other", 600, model_digest="n"))
    relief = next(each for each in wanted_of(view, 0.0, ("full", "a")) if isinstance(each, Relief))
    assert told(relief.choose([part("x", 100), part("y", 899)])) == [("x", "b")]


def test_one_of_the_emptiest_is_emptied_if_all_of_it_finds_room_as_it_grows() -> None:
    """Each row grows by 31 blocks in half a minute. b has 1000 - 700 - 62 = 238 left then, c 1000 - 600 - 62 = 338."""
    assert EMPTY_HORIZON_S == 30.0
    rule, view = Consolidation(), make_view(busy("a", 300), busy("b", 700), busy("c", 600), unused("u"))
    sources = [rule(view, set(), EMPTY_PERIOD_S * number)[0].source.worker_id for number in range(4)]
    assert set(sources) == {"a", "c"}, "of three in use the two emptiest, by turns"
    emptying = Emptying(view.workers[0].report, [view.workers[1].report, view.workers[2].report])
    moves = emptying.choose([part("x", 200), part("y", 100)])
    assert told(moves) == [("x", "b"), ("y", "c")]
    assert emptying.tell(moves[0]) == "a is emptied; b has room"
    assert told(emptying.choose([part("x", 207), part("y", 93)])) == [("x", "b"), ("y", "c")]
    assert told(emptying.choose([part("x", 208), part("y", 92)])) == [("x", "c"), ("y", "b")], "239 as it grows"
    assert not emptying.choose([part("x", 308), part("y", 92)]), "339"


def knows(*names: str) -> MigrationPart:
    return MigrationPart(shared_prefixes=tuple(SharedPrefix(name=name, num_blocks=100) for name in names))


def test_what_the_target_has_by_name_weighs_nothing_there_and_all_that_it_lacks_does() -> None:
    """Of 1 000 there are 22 by which those grow who are there, and for who comes 60 and 11, and the prefix."""
    running = [part("x", 60, prefix="p", num_shared=100), part("y", 898)]
    for used, prefixes, fits in ((807, "", True), (808, "", False), (907, "p", True), (908, "p", False)):
        relief = only_relief(busy("full", 999), busy("a", used, migration=knows(*prefixes)), unused("u"))
        assert told(relief.choose(running)) == [("x", "a" if fits else "u")], (used, prefixes)


def test_requests_over_one_prefix_go_together_unless_all_others_have_it() -> None:
    """100 blocks and 8 of 10, each of which grows by 31: 428 together, 41 each."""
    source = busy("a", 180, rows=8).report
    running = [part(str(number), 10, prefix="p", num_shared=100) for number in range(8)]
    for free, prefixes, num_moves in ((427, "", 0), (428, "", 8), (164, "p", 8), (163, "p", 0)):
        others = [busy(name, 1000 - 62 - free, migration=knows(*prefixes)).report for name in "bc"]
        moves = Emptying(source, others).choose(running)
        assert len(moves) == num_moves, (free, prefixes)
        assert len({move.target.worker_id for move in moves}) == (2 if prefixes else 1) * bool(moves)


def test_nothing_goes_unless_all_who_are_there_can_go() -> None:
    source, target = busy("a", 100, rows=3).report, busy("b", 100).report
    emptying = Emptying(source, [target])
    assert emptying.choose([part("x", 50), part("y", 50)]) == (), "a third one computes its prompt"
    assert len(emptying.choose([part("x", 50), part("y", 50, num_choices=2)])) == 2


@pytest.mark.parametrize(("here_s", "fits"), [(0.0192, True), (0.0194, False)])
def test_nobody_gets_so_much_that_its_steps_become_too_long(here_s: float, fits: bool) -> None:
    """300 blocks there, 100 that come, and in half a minute 31 of each of four: 524 blocks, 8 384 tokens of 8 µs."""
    cost = DecodeCost(step_s=here_s, sequence_s=3.4e-3, kv_token_s=8e-6)
    target = busy("b", 300, decode_cost=cost).report
    assert bool(Emptying(busy("a", 100).report, [target]).choose([part("x", 40), part("y", 60)])) == fits
    assert PACKED_STEP_S == 0.1


@pytest.mark.parametrize(("step_time_s", "fits"), [(0.0, True), (0.0559, True), (0.056, False)])
def test_prompts_make_steps_as_much_longer_as_of_late(step_time_s: float, fits: bool) -> None:
    """30 ms while 300 blocks decode there, 53.6 ms with 100 that come, and 34 of each of four by which they grow.

    So what is there may take 1.866 times as long. The 34 are a token in each step.
    """
    cost = DecodeCost(kv_token_s=0.03 / 4800)
    target = busy("b", 300, decode_cost=cost, step_time_s=step_time_s).report
    assert bool(Emptying(busy("a", 100).report, [target]).choose([part("x", 40), part("y", 60)])) == fits


def test_what_has_to_go_goes_to_one_that_is_less_full_if_steps_would_be_too_long() -> None:
    slow = DecodeCost(step_s=0.01, kv_token_s=7e-6)
    relief = only_relief(busy("full", 999), busy("a", 600, decode_cost=slow), busy("b", 800, decode_cost=slow))
    assert told(relief.choose([part("x", 100), part("y", 899)])) == [("x", "a")]


@pytest.mark.parametrize(
    "short",
    [
        busy("s", 995),
        busy("s", 50, num_queued_for_memory=1),
        busy("s", 50, throttled=True),
    ],
)
def test_who_lacks_memory_is_not_emptied_and_gets_nothing_and_others_are_emptied_all_the_same(
    short: WorkerStatus,
) -> None:
    view, rule = make_view(busy("a", 100), busy("b", 200), short), Consolidation()
    for number in range(4):
        wanted = rule(view, set(), number * EMPTY_PERIOD_S)
        (emptying,) = [each for each in wanted if isinstance(each, Emptying)]
        assert (emptying.source.worker_id, [each.worker_id for each in emptying.others]) == ("a", ["b"])


def test_who_takes_part_in_a_move_or_is_closing_gets_nothing_and_has_to_give_all_the_same() -> None:
    short, closing = busy("a", 999), busy("b", 300, migration=MigrationPart(closing="it is emptied"))
    relief, emptying = wanted_of(make_view(short, closing, busy("c", 400), busy("d", 500)))
    assert isinstance(relief, Relief)
    assert (relief.source.worker_id, relief.is_urgent, relief.open_worker) == ("a", True, None)
    running = [part("x", 100), part("y", 899)]
    taken = [{WorkerId(name) for name in names} for names in ("", "d", "cd")]
    assert [told(relief.choose(running, names)) for names in taken] == [[("x", "d")], [("x", "c")], []]
    assert isinstance(emptying, Emptying)
    assert (emptying.source.worker_id, emptying.is_urgent, emptying.open_worker) == ("c", False, "d")
    running = [part("x", 100), part("y", 200)]
    assert told(emptying.choose(running)) == [("y", "d"), ("x", "d")]
    assert not emptying.choose(running, {WorkerId("d")})


def test_requests_that_a_worker_refuses_while_it_is_emptied_go_where_most_room_is() -> None:
    view = make_view(busy("a", 100), busy("b", 300), busy("c", 200), busy("d", 250))
    (emptying,) = wanted_of(view)
    assert {emptying.source.worker_id: emptying.open_worker} in ({"a": "c"}, {"c": "a"}, {"d": "a"})


def test_nothing_is_emptied_where_one_is_in_use_or_the_others_have_less_room_than_it_holds() -> None:
    assert wanted_of(make_view(busy("a", 100), unused("b"))) == []
    assert wanted_of(make_view(busy("a", 600), busy("b", 600))) == []
    assert wanted_of(make_view(busy("a", 100), busy("b", 100, stage_address=""))) == []


def test_the_emptiest_are_looked_at_by_turns() -> None:
    rule = Consolidation()
    view = make_view(*(busy(f"w{number}", 10 * number) for number in range(1, 9)))
    pause_s = EMPTY_PERIOD_S / NUM_EMPTIEST
    sources = [each.source.worker_id for number in range(8) for each in rule(view, set(), number * pause_s)]
    assert Counter(sources) == dict.fromkeys(("w1", "w2", "w3", "w4"), 2)
    assert rule(view, set(), 7 * pause_s + 0.5) == [], "not yet"


@pytest.mark.parametrize("seed", range(100))
def test_moves_that_empty_a_worker_leave_everybody_room_for_half_a_minute(seed: int) -> None:
    random = Random(seed)
    rows = [random.randrange(1, 6) for _ in range(random.randrange(2, 7))]
    reports = [busy(f"w{number}", random.randrange(50, 900), count).report for number, count in enumerate(rows)]
    source, *others = reports
    cuts = sorted(random.sample(range(1, source.num_used_blocks), rows[0] - 1))
    sizes = [after - before for before, after in zip([0, *cuts], [*cuts, source.num_used_blocks], strict=True)]
    moves = Emptying(source, others).choose([part(str(number), size) for number, size in enumerate(sizes)])
    assert len(moves) in {0, rows[0]}
    coming: Counter[str] = Counter()
    for move in moves:
        coming[move.target.worker_id] += move.part.num_blocks + grown_blocks(source, 1, EMPTY_HORIZON_S)
    for other in others:
        grown = grown_blocks(other, other.num_running, EMPTY_HORIZON_S)
        assert not coming[other.worker_id] or coming[other.worker_id] + grown <= free_blocks(other)


def test_a_worker_that_says_nothing_of_its_pace_grows_by_a_block_for_each_row() -> None:
    report: WorkerReport = make_report("w", num_blocks=100, num_running=3)
    assert grown_blocks(report, 3, 10.0) == 3
