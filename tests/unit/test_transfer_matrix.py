"""Which layers have to be sent: applying the cells turns one layout into the other, and nothing moves for nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.transfer.matrix import Cell, Layout, transfer_matrix
from shared.ids import WorkerId
from shared.layers import LayerRange

WORKERS = [WorkerId(name) for name in "abcdef"]


@st.composite
def layouts(draw: st.DrawFn, num_layers: int) -> Layout:
    count = draw(st.integers(1, min(len(WORKERS), num_layers)))
    borders = sorted(draw(st.permutations(range(1, num_layers)))[: count - 1])
    names = draw(st.permutations(WORKERS))[:count]
    ranges = [LayerRange(*pair) for pair in zip([0, *borders], [*borders, num_layers], strict=True)]
    return Layout.of(draw(st.permutations(list(zip(names, ranges, strict=True)))))


def holders(layout: Layout) -> list[WorkerId]:
    return [worker_id for worker_id, layers in layout.parts for _ in layers]


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(layouts(n), layouts(n))))
def test_cells_turn_one_layout_into_the_other(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    cells = transfer_matrix(source, target)
    held = holders(source)
    for cell in cells:
        for layer in cell.layers:
            assert held[layer] == holders(source)[layer] == cell.source_id, "each layer moves at most once"
            held[layer] = cell.target_id
            assert cell.source_id != cell.target_id
    assert held == holders(target)
    assert cells == sorted(cells, key=lambda cell: cell.layers.first)
    for one, other in itertools.pairwise(cells):
        same = (one.source_id, one.target_id) == (other.source_id, other.target_id)
        assert not (same and one.layers.end == other.layers.first), "cells are as large as they can be"


def test_an_exchange_of_two_and_its_restore() -> None:
    a, b = WORKERS[:2]
    whole = Layout.of([(a, LayerRange(0, 8))])
    group = Layout.of([(b, LayerRange(3, 8)), (a, LayerRange(0, 3))])
    assert transfer_matrix(whole, group) == [Cell(a, b, LayerRange(3, 8))]
    assert transfer_matrix(group, whole) == [Cell(b, a, LayerRange(3, 8))]
    assert transfer_matrix(group, group) == []


def test_what_is_no_layout_is_refused() -> None:
    a, b = WORKERS[:2]
    for parts, reason in [
        ([], "at least one"),
        ([(a, LayerRange(1, 3))], "do not follow layer 0"),
        ([(a, LayerRange(0, 3)), (b, LayerRange(4, 5))], "do not follow layer 3"),
        ([(a, LayerRange(0, 3)), (b, LayerRange(2, 5))], "do not follow layer 3"),
        ([(a, LayerRange(0, 3)), (a, LayerRange(3, 5))], "twice"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Layout.of(parts)
    with pytest.raises(ValueError, match="8 layers and one of 9"):
        transfer_matrix(Layout.of([(a, LayerRange(0, 8))]), Layout.of([(a, LayerRange(0, 9))]))
    for first, end in [(3, 3), (4, 3), (-1, 2)]:
        with pytest.raises(ValueError, match="no range"):
            LayerRange(first, end)


@given(st.integers(0, 2**32 - 1))
def test_overlap_is_that_of_sets(seed: int) -> None:
    a, b, c, d = np.random.default_rng(seed).integers(0, 8, 4).tolist()
    one, other = LayerRange(a, a + b + 1), LayerRange(c, c + d + 1)
    both = one.overlap(other)
    assert sorted(set(one) & set(other)) == (list(both) if both is not None else [])
    assert all((layer in one) == (layer in set(one)) for layer in range(20))
