"""Whom the worker that gets a request is told to bring its prefix from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from services.dispatcher.policy.placement import Placed
from services.dispatcher.session.choice import WorkerChoice
from services.dispatcher.session.gaps import GapHistogram
from services.dispatcher.session.request import NewRequest
from services.dispatcher.session.session import Session
from services.dispatcher.state import ClusterState
from shared.ids import RequestId, StreamId, WorkerId
from shared.messages.report import Liveness, WorkerStatus
from shared.messages.request import pack_token_ids
from shared.prefix_names import following_names, mark_of, root_name
from shared.prefix_sketch import sketch_of
from shared.types import SamplingParams
from tests.support.fake_worker import make_status
from tests.support.kinds import some
from tests.support.statuses import make_view

BLOCK_SIZE = 16
PROMPT = pack_token_ids(list(range(1, 8 * BLOCK_SIZE + 2)))
NAMES = following_names(root_name(""), PROMPT, BLOCK_SIZE)


def holder(name: str, num_blocks: int, liveness: Liveness) -> WorkerStatus:
    """Return a worker that holds so many blocks of the prompt."""
    return make_status(
        name,
        liveness=liveness,
        prefixes=sketch_of(np.array([mark_of(each) for each in NAMES[:num_blocks]], dtype=np.uint32)),
        block_size=BLOCK_SIZE,
        model_digest="0",
        stage_address=f"{name}:1",
    )


@pytest.mark.parametrize(
    ("lost", "dead", "expected"),
    [
        ("", "", ("w1", 8)),
        ("w1", "", ("w2", 4)),
        ("", "w1", ("w2", 4)),
        ("w2", "", ("w1", 8)),
        ("w1", "w2", None),
        ("w2", "w1", None),
    ],
)
def test_it_is_who_has_most_of_those_that_are_there(lost: str, dead: str, expected: tuple[str, int] | None) -> None:
    """`w1` has all of the prompt, `w2` half of it, and `w0`, where it goes, a block."""
    state = ClusterState("tiny", 10.0, asks_prefixes=True)
    blocks = {"w0": 1, "w1": 8, "w2": 4}
    alive = {name: Liveness.DEAD if name == dead else Liveness.ALIVE for name in blocks}
    state.apply(make_view(*(holder(name, number, alive[name]) for name, number in blocks.items())), 0.0)
    others: Any = SimpleNamespace(lost_workers={WorkerId(lost)})
    placed = Placed(WorkerId("w0"), "the first", num_cached=BLOCK_SIZE)
    choice = WorkerChoice(others, state, others, lambda *_: placed, others)
    request = NewRequest(RequestId("r"), PROMPT, SamplingParams(max_tokens=10), arrival_s=0.0, limit_s=60.0)
    prefix = some(choice.find(Session(request, StreamId(1), GapHistogram()), set())).prefix
    assert (prefix and (prefix.worker_id, prefix.num_tokens)) == (expected and (expected[0], expected[1] * BLOCK_SIZE))
