"""Which tokens count as the likeliest, and what is kept of it for replays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.contract.batch import RowInit
from services.worker.sampling import logprobs as logprobs_module
from services.worker.sampling.logprobs import LogprobTable
from services.worker.sequences.logprob_log import LogprobLog
from shared.ids import RequestId
from shared.stream_extras import TokenLogprob
from shared.types import SamplingParams


def table_of(*asked: int | None) -> LogprobTable:
    table = LogprobTable(len(asked))
    for row, count in enumerate(asked):
        table.put(RowInit(row, SamplingParams(max_tokens=1, logprobs=count)))
    return table


def said(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    table = table_of(count)
    return table.of_tokens(logits.unsqueeze(0), np.zeros(1, dtype=np.int32), np.array([token]))[0]


@pytest.mark.parametrize("count", range(8))
def test_of_tokens_that_tie_the_lowest_ids_come_first(count: int) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -torch.inf])
    expected = logits.log_softmax(-1)
    got = said(logits, 5, count)
    assert got.logprob == float(expected[5])
    assert got.top == tuple((i, float(expected[i])) for i in [1, 3, 2, 4, 5, 0, 6][:count])


def test_many_ties_at_the_border_give_the_lowest_ids() -> None:
    got = said(torch.zeros(5000), 4000, 20)
    assert [token for token, _ in got.top] == list(range(20))


def test_rows_are_normalised_in_parts_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    table, rows, tokens = table_of(3, None, 0, 5, 5, 1), np.arange(6, dtype=np.int32), np.arange(6)
    whole = table.of_tokens(logits, rows, tokens)
    assert sorted(whole) == [0, 2, 3, 4, 5]
    monkeypatch.setattr(logprobs_module, "LOGPROB_ELEMENTS", 100)
    assert table.of_tokens(logits, rows, tokens) == whole


def test_a_sequence_keeps_its_last_log_probabilities_within_the_size_of_all() -> None:
    """Each entry takes 12 + 8 packed bytes and 64 beside them: 84, so ten fit 840."""
    log = LogprobLog(max_bytes=840)
    one, other = (RequestId("a"), 1), (RequestId("b"), 1)
    for i in range(6):
        log.append(one, TokenLogprob(-float(i)))
    assert log.last(one, 2) == [TokenLogprob(-4.0), TokenLogprob(-5.0)]
    assert log.last(one, 0) == []
    for i in range(8):
        log.append(other, TokenLogprob(-float(i)))
    assert [token.logprob for token in log.last(one, 100)] == [-4.0, -5.0]
    assert len(log.last(other, 100)) == 8
    for i in range(10):
        log.append(other, TokenLogprob(-float(i)))
    assert log.last(one, 100) == []
    assert log.last((RequestId("c"), 1), 5) == []
    assert (len(log._entries), len(log._order)) == (1, 10)
