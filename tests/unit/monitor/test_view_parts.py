"""A view in parts: whatever its size, what goes in comes out whole, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter

from shared.ids import Incarnation
from shared.messages.report import (
    ClusterView,
    Liveness,
    TransferKind,
    TransferProgress,
    ViewFacts,
    WorkerPhase,
    WorkerStatus,
)
from shared.view_parts import MAX_PART_BYTES, FactsPages, ViewAssembly, encode_parts, encode_whole_parts
from shared.wire import decode_json, decode_union_json, pack_rows
from tests.support.statuses import make_elastic_report, make_elastic_view, make_status, make_view

_MESSAGES: TypeAdapter[ClusterView | ViewFacts] = TypeAdapter(
    Annotated[ClusterView | ViewFacts, Field(discriminator="kind")]
)
OVERHEAD_BYTES = 8 * 1024
"""What a part has beside its rows: numbers, and names of pages."""


class Writer:
    """Makes what is told of one view after the other."""

    def __init__(self) -> None:
        self.pages = FactsPages()
        self.names: tuple[str, ...] = ()

    def tell(self, view: ClusterView) -> tuple[list[bytes], list[bytes]]:
        """Return the pages that have changed, and the parts."""
        self.pages.take(view.workers)
        names = self.pages.names()
        changed = [page for page, name in enumerate(names) if self.names[page : page + 1] != (name,)]
        self.names = names
        return [self.pages.encode(page) for page in changed], encode_parts(view, names)


def heard(assembly: ViewAssembly, messages: Sequence[bytes]) -> list[ClusterView]:
    """Return the whole views that come of it."""
    views = [assembly.take(decode_union_json(data, _MESSAGES)) for data in messages]
    return [view for view in views if view is not None]


def moved(num_sources: int) -> TransferProgress:
    sources = tuple("s" * 128 for _ in range(num_sources))
    return TransferProgress(kind=TransferKind.KV_COPY, num_bytes=2, num_moved_bytes=1, sources=sources)


statuses = st.builds(
    make_status,
    st.from_regex(r"[a-z0-9_-]{1,12}", fullmatch=True),
    liveness=st.sampled_from(Liveness),
    throttled=st.booleans(),
    phase=st.sampled_from(WorkerPhase),
    pid=st.integers(0, 9),
    host=st.text(max_size=512),
    incarnation=st.sampled_from([Incarnation(0), Incarnation(1)]),
    kernels=st.text(max_size=512),
    num_used_blocks=st.integers(0, 10**9),
    token_s=st.floats(0, 3600),
    progress_text=st.text(max_size=512),
    moves=st.lists(st.builds(moved, st.integers(0, 64)), max_size=8),
)
clusters = st.lists(statuses, max_size=12, unique_by=lambda status: status.report.worker_id)


@settings(max_examples=25, deadline=None)
@given(st.lists(clusters, min_size=1, max_size=4))
def test_every_view_comes_out_as_it_went_in_whoever_came_went_or_changed_before(
    views: list[list[WorkerStatus]],
) -> None:
    writer, assembly = Writer(), ViewAssembly()
    for number, workers in enumerate(views):
        workers.sort(key=lambda status: status.report.worker_id)
        view = ClusterView(sequence_number=number, num_left_out=number, workers=tuple(workers))
        pages, parts = writer.tell(view)
        assert heard(assembly, [*pages, *parts]) == [view]
        assert heard(ViewAssembly(), encode_whole_parts(view)) == [view]


@pytest.mark.parametrize("num_workers", [0, 1, 700])
def test_no_part_comes_near_the_limit_of_the_bus_and_facts_travel_once(num_workers: int) -> None:
    writer, assembly = Writer(), ViewAssembly()
    pages, parts = writer.tell(make_elastic_view(num_workers))
    assert max(map(len, [*pages, *parts])) <= MAX_PART_BYTES + OVERHEAD_BYTES
    assert len(heard(assembly, [*pages, *parts])) == 1
    later = make_elastic_view(num_workers, 2, num_used_blocks=77_777)
    pages, parts = writer.tell(later)
    assert pages == []
    assert not any(b"layer_bytes" in part for part in parts)
    assert sum(map(len, parts)) <= 700 * num_workers + OVERHEAD_BYTES * len(parts)
    assert heard(assembly, parts) == [later]


def test_a_row_that_is_larger_than_a_part_goes_alone() -> None:
    """8 moves of 64 sources of 128 characters that JSON writes as six each: 400 KB."""
    fat = moved(0).model_copy(update={"sources": ("\x01" * 128,) * 64})
    view = make_view(make_status("a"), make_status("b", moves=[fat] * 8), make_status("c"))
    pages, parts = Writer().tell(view)
    assert len(parts) == 3
    assert max(map(len, parts)) < 512 * 1024
    assert heard(ViewAssembly(), [*pages, *parts]) == [view]


def test_rows_are_packed_in_order_and_never_over_the_limit() -> None:
    rows = [b"x" * size for size in (3, 3, 9, 1, 1, 1, 1, 12, 2)]
    packed = pack_rows(rows, 8)
    assert [row for some in packed for row in some] == rows
    assert all(len(some) == 1 or sum(len(row) + 1 for row in some) <= 8 for some in packed)
    assert pack_rows([], 8) == [[]]


def test_a_worker_that_starts_anew_changes_one_page_and_one_that_is_gone_leaves_it() -> None:
    writer, assembly = Writer(), ViewAssembly()
    view = make_elastic_view(300)
    pages, parts = writer.tell(view)
    assert len(pages) > 2
    heard(assembly, [*pages, *parts])
    anew = make_elastic_report(150, incarnation=Incarnation(5))
    workers = [*view.workers[:150], WorkerStatus(liveness=Liveness.ALIVE, age_s=0.0, report=anew), *view.workers[151:]]
    changed = view.model_copy(update={"workers": tuple(workers)})
    pages, parts = writer.tell(changed)
    assert len(pages) == 1
    assert heard(assembly, [*pages, *parts]) == [changed]
    fewer = view.model_copy(update={"workers": view.workers[:10]})
    pages, parts = writer.tell(fewer)
    assert len(writer.names) == 1
    assert heard(assembly, [*pages, *parts]) == [fewer]


def test_of_a_view_of_which_a_part_is_lost_late_or_doubled_nothing_is_seen() -> None:
    writer, assembly = Writer(), ViewAssembly()
    views = [make_elastic_view(900, number, num_used_blocks=number) for number in range(3)]
    pages, parts = writer.tell(views[0])
    assert len(parts) >= 3
    assert heard(assembly, [*pages, *parts, *parts[1:]]) == [views[0]], "doubled parts are no second view"
    for lost in range(len(parts)):
        _, parts = writer.tell(views[1])
        assert heard(assembly, parts[:lost] + parts[lost + 1 :]) == [], f"part {lost} is lost"
    _, newer = writer.tell(views[2])
    assert heard(assembly, [*parts[:2], *parts[1:-1]]) == [], "one is doubled and one is lost"
    assert heard(assembly, [*parts[:2], *parts[1:]]) == [views[1]], "one is doubled on the way"
    for first, second in pairwise(range(len(parts))):
        mixed = [*parts[: first + 1], *newer[second:]]
        assert heard(assembly, mixed) == [], "the beginning of one view and the end of another"
    assert heard(assembly, [parts[0], newer[0], parts[1], *newer[1:]]) == [views[2]], "a late part is ignored"


def test_a_view_waits_for_its_page_and_is_whole_when_that_comes() -> None:
    writer, assembly = Writer(), ViewAssembly()
    view = make_elastic_view(300)
    pages, parts = writer.tell(view)
    assert heard(assembly, [*pages[1:], *parts]) == []
    assert assembly.missing == [0]
    assert heard(assembly, pages[:1]) == [view]


def test_a_whole_view_of_a_monitor_that_knows_no_parts_is_taken_as_it_is() -> None:
    view = make_elastic_view(3)
    whole = decode_json(view.model_dump_json(exclude={"part", "num_parts", "facts"}).encode(), ClusterView)
    assert heard(ViewAssembly(), [whole.model_dump_json().encode()]) == [view]
