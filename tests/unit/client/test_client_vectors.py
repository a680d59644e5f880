"""One file of vectors, two languages: what make.py writes is committed, and the pacer passes it."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from sluice_client.pacer import make_pacer
from sluice_client.qoe import QoeState, QoeTarget
from sluice_client.segment import Segmenter

CLIENT = Path(__file__).parents[3] / "client"
VECTORS: dict[str, Any] = json.loads((CLIENT / "vectors" / "pacer.json").read_text())
MAKE: dict[str, Any] = runpy.run_path(str(CLIENT / "vectors" / "make.py"))


def by_name(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=[case["name"] for case in cases])


def assert_same(got: Any, expected: Any, where: str = "") -> None:
    """Equal, numbers within the vectors' tolerance."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(got[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(got[i], value, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=VECTORS["tolerance"], abs=VECTORS["tolerance"]), where
    else:
        assert got == expected, where


def test_the_committed_file_is_what_the_script_makes() -> None:
    assert_same(json.loads(json.dumps(MAKE["build"]())), VECTORS)


@by_name(VECTORS["qoe"])
def test_qoe(case: dict[str, Any]) -> None:
    state = QoeState(QoeTarget(**case["target"]))
    assert_same([state.deliver(t) for t in case["delivered_s"]], case["displayed_s"])
    assert_same(state.delay_s, case["delay_s"])
    assert_same(state.final(), case["final"])
    for at in case["at"]:
        assert_same(state.qoe_at(at["t_s"], finished=at["finished"]), at["qoe"])


@by_name(VECTORS["thinking"])
def test_thinking(case: dict[str, Any]) -> None:
    """A tag that came before, without text, is no text either."""
    state, pacer = QoeState(QoeTarget(**case["target"])), make_pacer("reading", QoeTarget(**case["target"]))
    state.deliver(0.0)
    pacer.push(0.0, "", 1)
    for at_s in case["thought_s"]:
        state.think(at_s)
        pacer.push(at_s, "", 0, thinks=True)
    assert_same([state.deliver(t) for t in case["delivered_s"]], case["displayed_s"])
    for at_s in case["delivered_s"]:
        pacer.push(at_s, "a ", 1)
    assert_same(state.final(), case["final"])
    for at in case["at"]:
        assert_same(state.qoe_at(at["t_s"]), at["qoe"])
    pacer.finish(case["at"][0]["t_s"])
    assert_same(pacer.qoe, case["final"])
    assert_same([item.at_s for item in pacer.pop(float("inf")) if item.text], case["displayed_s"])


@by_name(VECTORS["pacer"])
def test_pacer(case: dict[str, Any]) -> None:
    pacer = make_pacer(case["mode"], QoeTarget(**case["target"]))
    MAKE["replay"](pacer, case["events"])
    assert_same([[item.text, item.at_s] for item in pacer.pop(float("inf"))], case["shown"])
    assert_same([pacer.qoe, pacer.stats().stall_seconds], [case["qoe"], case["stall_seconds"]])


@by_name(VECTORS["segments"])
def test_segments(case: dict[str, Any]) -> None:
    segmenter = Segmenter()
    assert [[list(f) for f in segmenter.feed(piece)] for piece in case["pieces"]] == case["fragments"]
