"""By what workers know that they can go on with each other's layers and KV: the same for one model, and only then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.worker.models.digests import model_digest
from shared.layers import LayerRange
from tests.support.live_groups import SHAPES
from tests.support.runners import KERNELS, MIB
from tests.unit.worker.executor.conftest import ModelOf

pytestmark = pytest.mark.kernels

OTHERS: dict[str, dict[str, Any]] = {"number format": {"dtype": "bfloat16"}, "block size": {"block_size": 32}}
if KERNELS != "torch":
    OTHERS["kernels"] = {"kernels": "torch"}


def test_workers_of_one_model_have_the_same_whatever_memory_they_have_and_layers_they_hold(model_of: ModelOf) -> None:
    first, second = model_of("llama"), model_of("llama", memory_bytes=9 * MIB)
    assert first.info.capacity != second.info.capacity
    second.keep(LayerRange(0, 2))
    assert len(first.digest) == 32
    assert first.digest == second.digest


@pytest.mark.parametrize("what", OTHERS)
def test_another_way_to_compute_and_keep_kv_is_told_from_it(model_of: ModelOf, what: str) -> None:
    """In deterministic mode: there other kernels give other bits."""
    assert model_of("llama").digest != model_of("llama", **OTHERS[what]).digest


def test_one_parameter_is_enough(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "other weights", replace(SHAPES["llama"], seed=9))
    monkeypatch.setitem(SHAPES, "other positions", replace(SHAPES["llama"], extra={"rope_theta": 20_000.0}))
    found = {model_of(name).digest for name in ("llama", "other weights", "other positions")}
    assert len(found) == 3


def test_what_ends_a_text_does_not_count_and_every_part_does(model_of: ModelOf) -> None:
    model = model_of("tied")
    digests = {(None, "head"): b"0" * 16, (0, "norm"): b"1" * 16, (10, "norm"): b"2" * 16}
    expected = model_digest(model.spec, digests, "float32")
    assert model_digest(replace(model.spec, eos_token_ids=(1, 2), left_out=("a file",)), digests, "float32") == expected
    assert model_digest(model.spec, dict(reversed(digests.items())), "float32") == expected
    for part in digests:
        assert model_digest(model.spec, {**digests, part: b"3" * 16}, "float32") != expected
    swapped = {**digests, (0, "norm"): digests[10, "norm"], (10, "norm"): digests[0, "norm"]}
    assert model_digest(model.spec, swapped, "float32") != expected
    assert model_digest(model.spec, digests, "float16") != expected
