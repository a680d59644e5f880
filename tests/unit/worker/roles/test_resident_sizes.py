"""What a stage of a group reports of its memory, against the sizes that were given."""

from __future__ import annotations

import pytest

from services.worker.roles.resident import resident_in_group
from shared.layers import LayerRange
from tests.support.drop_builders import make_elastic

FACTS = make_elastic(
    layer_bytes=(10, 20, 30, 40), outer_bytes=100, first_stage_end=60, last_stage_begin=50, block_bytes=7
)


@pytest.mark.parametrize(
    ("held", "resident", "param_bytes"),
    [
        ((0, 2), (0, 2), 10 + 20 + 60),
        ((1, 3), (1, 3), 20 + 30),
        ((2, 4), (2, 4), 30 + 40 + 50),
        ((2, 4), (0, 4), 100 + 100),
    ],
)
def test_a_stage_has_its_layers_and_what_it_needs_outside_of_them(
    held: tuple[int, int], resident: tuple[int, int], param_bytes: int
) -> None:
    found = resident_in_group(FACTS, LayerRange(*held), LayerRange(*resident), 0.5, 11)
    assert found.param_bytes == param_bytes
    assert found.kv_bytes == 11 * 2 * 2 * 7, "keys and values of two layers"
    assert (found.layers, found.loaded_ratio) == (LayerRange(*resident), 0.5)
