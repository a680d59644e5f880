"""KV or tokens: nobody carries or computes more than its boundary, and who can go does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from random import Random

import pytest

from services.planner.policy.packing.adaptive import (
    ALL_KINDS,
    AskedMove,
    MoveKind,
    TickBudget,
    divide,
    link_boundary,
    prefill_boundary,
)
from services.planner.policy.packing.bins import Name
from shared.cost import load_profile, prefill_pairs

KV_ONLY = frozenset({MoveKind.KV})


def budget(**boundaries: int) -> TickBudget:
    made = TickBudget()
    made.refill({int(name[1:]) if name[0] == "w" else name: tokens for name, tokens in boundaries.items()})
    return made


def asked(name: Name, num_tokens: int, *, overflows: bool = False) -> AskedMove:
    return AskedMove(name, num_tokens, ("out", "in"), 0, overflows)


def draw(random: Random, number: int) -> AskedMove:
    source, target = random.sample(range(4), 2)
    return AskedMove(number, random.randrange(1, 150), (("out", source), ("in", target)), target)


def test_the_largest_go_first_each_as_kv_while_links_last_then_as_tokens_then_later() -> None:
    moves = [asked("small", 30), asked("large", 80), asked("middle", 50), asked("late", 29)]
    chosen = divide(moves, budget(out=100, **{"in": 200}), budget(w0=80))
    expected = {"large": MoveKind.KV, "middle": MoveKind.TOKENS, "small": MoveKind.TOKENS, "late": MoveKind.LATER}
    assert chosen == expected


def test_every_link_on_the_way_has_to_have_room() -> None:
    assert divide([asked("a", 30)], budget(out=100, **{"in": 10}), budget())["a"] is MoveKind.KV, "a whole boundary"
    links = budget(out=100, **{"in": 40})
    assert divide([asked("a", 30), asked("b", 20)], links, budget()) == {"a": MoveKind.KV, "b": MoveKind.LATER}


def test_who_overflows_comes_first_and_does_not_wait() -> None:
    moves = [asked("large", 90), asked("full", 20, overflows=True), asked("too", 60, overflows=True)]
    chosen = divide(moves, budget(out=60, **{"in": 60}), budget(w0=30))
    assert chosen == {"too": MoveKind.KV, "full": MoveKind.TOKENS, "large": MoveKind.LATER}
    nothing_left = divide([asked("more", 50, overflows=True)], budget(out=10), budget())
    assert nothing_left["more"] is not MoveKind.LATER


def test_what_is_larger_than_a_boundary_takes_the_ticks_that_it_needs() -> None:
    links, prefills, kinds = budget(out=10, **{"in": 10}), budget(), list[MoveKind]()
    assert divide([asked("large", 35)], links, prefills)["large"] is MoveKind.KV
    for tick in range(5):
        links.refill({"out": 10, "in": 10} if tick > 1 else {})
        kinds.append(divide([asked(tick, 5)], links, prefills)[tick])
    assert kinds == [MoveKind.LATER] * 2 + [MoveKind.KV] * 3, "of the third tick 5 are left"


def test_who_is_gone_is_forgotten_once_its_ticks_are_over() -> None:
    left = budget(gone=10, owing=10)
    left.take(["owing"], 25)
    left.refill({})
    assert (left.fits(["gone"], 1), left.ticks(["owing"], 0)) == (False, 0.5)
    left.refill({})
    assert left.fits(["owing"], 5)
    left.refill({})
    assert not left.fits(["owing"], 1)


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize(("computed", "kind"), [(35, MoveKind.TOKENS), (11, MoveKind.TOKENS), (10, MoveKind.KV)])
def test_what_is_larger_than_what_links_carry_goes_the_way_that_takes_fewer_ticks(
    computed: int, kind: MoveKind, *, overflows: bool
) -> None:
    move = asked("large", 35, overflows=overflows)
    assert divide([move], budget(out=10, **{"in": 10}), budget(w0=computed))["large"] is kind


@pytest.mark.parametrize(("overflows", "second"), [(False, MoveKind.KV), (True, MoveKind.TOKENS)])
def test_who_overflows_goes_the_quickest_way_though_another_one_has_carried_nothing(
    second: MoveKind, *, overflows: bool
) -> None:
    moves = [asked(name, 35, overflows=overflows) for name in ("a", "b")]
    chosen = divide(moves, budget(out=10, **{"in": 10}), budget(w0=35))
    assert chosen == {"a": MoveKind.TOKENS, "b": second}, "one tick later instead of two and a half"


@pytest.mark.parametrize("seed", range(30))
def test_over_time_nobody_carries_or_computes_more_than_its_boundaries_and_one_move(seed: int) -> None:
    random, links, prefills = Random(seed), TickBudget(), TickBudget()
    carried: dict[Hashable, int] = {
        (way, each): random.randrange(20, 100) for way in ("out", "in") for each in range(4)
    }
    computed: dict[Hashable, int] = {each: random.randrange(10, 60) for each in range(4)}
    bounds = carried | computed
    waiting, used, moved = dict[Name, AskedMove](), Counter[Hashable](), Counter[Name]()
    for tick in range(1, 60):
        for number in range(random.randrange(4)):
            waiting[10 * tick + number] = draw(random, 10 * tick + number)
        links.refill(carried)
        prefills.refill(computed)
        chosen = divide(waiting.values(), links, prefills)
        assert chosen.keys() == waiting.keys()
        for name, kind in chosen.items():
            if kind is not MoveKind.LATER:
                move = waiting.pop(name)
                moved[name] += 1
                for user in move.links if kind is MoveKind.KV else (move.target,):
                    used[user] += move.num_tokens
        for user, num_tokens in used.items():
            assert num_tokens <= bounds[user] * tick + 150
    assert moved
    assert max(moved.values()) == 1


@pytest.mark.parametrize("seed", range(30))
def test_with_both_kinds_whoever_could_go_as_kv_alone_goes_and_maybe_more(seed: int) -> None:
    random = Random(seed)
    moves = [draw(random, number) for number in range(random.randrange(1, 12))]
    bounds = {link: 120 for move in moves for link in move.links}

    def kinds_of(kinds: frozenset[MoveKind]) -> dict[Name, MoveKind]:
        links, prefills = TickBudget(), TickBudget()
        links.refill(bounds)
        prefills.refill(dict.fromkeys(range(4), 50))
        return divide(moves, links, prefills, kinds)

    alone, both = kinds_of(KV_ONLY), kinds_of(ALL_KINDS)
    assert {name for name, kind in alone.items() if kind is MoveKind.KV} == {
        name for name, kind in both.items() if kind is MoveKind.KV
    }
    assert MoveKind.TOKENS not in alone.values()


def test_boundaries_are_what_a_link_carries_and_what_decodes_hardly_notice() -> None:
    """Gbit/s of a link over KV of half a MiB per token; a chunk that makes steps 5 % longer, and one token more."""
    assert link_boundary(25e9 / 8, 2**19, 1.0) == 5960
    cost = load_profile("llama-2-7b-tp1-a100").cost

    def step_s(chunk: int) -> float:
        return cost.step_s(2 + chunk, 6_500, prefill_pairs(2_000, chunk))

    limit_s = 1.05 * step_s(0)
    chunk = prefill_boundary(step_s, limit_s)
    assert step_s(chunk) <= limit_s < step_s(chunk + 1)
    assert prefill_boundary(step_s, 100.5 * limit_s) == int(100.5 * chunk)
    assert prefill_boundary(step_s, 1.0, slowdown=0.0) == 0
