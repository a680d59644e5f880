"""The alerts of docs/operations.md against the real text of `/metrics`, of a dispatcher that is well and of a sick one.

Their names and labels are looked up here; Prometheus's own `promtool` evaluates them where it is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.samples import Sample

from shared.messages.report import Liveness
from tests.support.dispatchers import Running, Serve
from tests.support.fake_worker import make_status

ROOT: Final = Path(__file__).parents[2]
ROW: Final = re.compile(r"^\| (Sluice\w+) \| `(.+?)` \| (\d+m) \| .+ \|$", re.MULTILINE)
ALERTS: Final = {
    name: (expression, lasts) for name, expression, lasts in ROW.findall((ROOT / "docs" / "operations.md").read_text())
}
SELECTOR: Final = re.compile(r"\b((?:sluice|vllm):\w+|process_\w+)(?:\{(.*?)\})?")
MATCHER: Final = re.compile(r'(\w+)(!?=)"([^"]*)"')
LABELS: Final = re.compile(r"\b(?:without|by) \(([^)]*)\)")
MINUTES: Final = 40
"""For which the series go on as they are, a value each minute."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


def selected(expression: str, samples: list[Sample]) -> dict[str, list[Sample]]:
    """Return for each selector of an expression the samples that it selects."""
    found = {}
    for match in SELECTOR.finditer(expression):
        wanted = MATCHER.findall(match[2] or "")
        found[match[0]] = [
            sample
            for sample in samples
            if sample.name == match[1] and all((sample.labels[k] == v) == (op == "=") for k, op, v in wanted)
        ]
    return found


async def pages(running: Running) -> tuple[list[Sample], list[Sample]]:
    """Return what a dispatcher says while all is well, and while its worker is full and dead and no view comes."""
    await running.view(make_status())
    await running.stream()
    well = await running.samples()
    await running.view(make_status(liveness=Liveness.DEAD, num_blocks=10, num_used_blocks=10, num_waiting=3))
    assert (await running.post())[0] == 503
    running.front.sessions.cluster.viewed_s -= 60
    return well, await running.samples()


async def test_every_name_and_label_of_an_alert_is_in_the_text(serve: Serve) -> None:
    async with serve(lambda _: [65, 66, 67], ready=False) as running:
        _, samples = await pages(running)
    assert len(ALERTS) == 8
    for name, (expression, _) in ALERTS.items():
        found = selected(expression, samples)
        assert found, name
        assert [selector for selector, each in found.items() if not each] == [], name
        (labels, *others) = [each for samples in found.values() for each in samples]
        for word in {word for group in LABELS.findall(expression) for word in group.split(", ")}:
            assert any(word in each.labels for each in (labels, *others)), f"{name}: {word}"


def series(samples: list[Sample], *, grows: bool) -> list[dict[str, str]]:
    """Return the samples as promtool takes them, constant; or with counters that grow each minute, counts slowest."""
    rows = []
    for each in samples:
        labels = ",".join(f"{key}={json.dumps(value)}" for key, value in each.labels.items())
        steps = {"total": 4, "sum": 4, "count": 1} if grows else {}
        step = steps.get(each.name.rpartition("_")[2], 0)
        rows.append({"series": f"{each.name}{{{labels}}}", "values": f"{each.value}+{step}x{MINUTES}"})
    return rows


def firing(folder: Path, rows: list[dict[str, str]]) -> set[str]:
    """Return the alerts of which promtool says that they fire at the end."""
    rules = [{"alert": name, "expr": expression, "for": lasts} for name, (expression, lasts) in ALERTS.items()]
    (folder / "rules.json").write_text(json.dumps({"groups": [{"name": "sluice", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", "rules.json"], cwd=folder, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    fires = set()
    for name in ALERTS:
        silent: dict[str, Any] = {"eval_time": f"{MINUTES}m", "alertname": name, "exp_alerts": []}
        test = {"interval": "1m", "input_series": rows, "alert_rule_test": [silent]}
        told = {"rule_files": ["rules.json"], "evaluation_interval": "1m", "tests": [test]}
        (folder / "test.json").write_text(json.dumps(told))
        done = subprocess.run(
            ["promtool", "test", "rules", "test.json"], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            assert f"alertname: {name}" in done.stdout + done.stderr, done.stderr
            fires.add(name)
    return fires


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus's promtool is not installed")
async def test_a_dispatcher_that_is_well_fires_nothing_and_a_sick_one_what_it_should(
    serve: Serve, tmp_path: Path
) -> None:
    async with serve(lambda _: [65, 66, 67], ready=False) as running:
        well, sick = await pages(running)
    assert firing(tmp_path, series(well, grows=False)) == set()
    assert firing(tmp_path, series(sick, grows=True)) == ALERTS.keys() - {"SluiceFilesShort"}
