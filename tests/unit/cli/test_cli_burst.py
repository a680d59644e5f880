"""The burst's sizes, what it sees of a cluster, and what it says in the end; the whole runs in test_cli_talk.py."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from cli.cluster import burst
from cli.cluster.burst import DEFAULTS, Burst, BurstReader, Sight, describe_burst, size_burst
from cli.cluster.settings import UpSettings
from cli.console import Console
from cli.conversation import Pacing
from cli.model import shipped_folder
from shared.errors import StartupError
from shared.messages.report import WorkerPhase, WorkerReport

NAMED = UpSettings().model_copy(update=DEFAULTS)
CHOSEN = NAMED.model_copy(update={"dtype": "float32", "device": "cpu", "memory": 2**30})


def report(name: str, num_blocks: int, num_stages: int = 1, stage: int = 0) -> WorkerReport:
    fields = {"num_blocks": num_blocks, "block_size": 16, "num_stages": num_stages, "stage": stage, "layers": (0, 5)}
    return WorkerReport.model_validate({"worker_id": name, "sequence_number": 1, "phase": WorkerPhase.READY, **fields})


def test_memory_is_the_parameters_a_workspace_and_little_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model that ships takes 8.4 MiB, of which its layers are 6.8, and a token's KV 2 560 bytes in 5 layers.

    Without compiled kernels a layer's KV of all 32 rows is gathered, 512 tokens each.
    """
    monkeypatch.setattr(burst, "has_cpu_kernels", lambda: False)
    gathers = size_burst(NAMED, CHOSEN, shipped_folder())[0].memory
    monkeypatch.setattr(burst, "has_cpu_kernels", lambda: True)
    sized, env = size_burst(NAMED, CHOSEN, shipped_folder())
    assert sized.memory is not None
    assert 8.4 + 4 + 6.8 / 2 < sized.memory / 2**20 < 8.4 + 8 + 6.8 / 2
    assert gathers == sized.memory + 32 * 512 * 2560 // 5
    assert (sized.dtype, sized.workers) == ("float32", 2)
    assert env["SLUICE_WORKER_PAGE_BYTES"] == str(2**14)
    named = NAMED.model_copy(update={"memory": 2**26})
    assert size_burst(named, CHOSEN, shipped_folder())[0].memory == 2**26


def test_the_kv_of_a_large_model_is_bounded_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(burst, "has_cpu_kernels", lambda: True)
    config = {"num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 1000, "dtype": "float32"}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**30)
    memory = size_burst(NAMED, CHOSEN, tmp_path)[0].memory
    assert memory is not None
    token_bytes = 2 * 24 * 2 * 64 * 4
    assert 0 < memory - 2**30 - burst.MAX_KV_TOKENS * token_bytes < 16 * 2**20


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": "x"}])
def test_a_model_without_sizes_and_a_cluster_of_one_worker_are_refused(tmp_path: Path, config: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="does not say its sizes"):
        size_burst(NAMED, CHOSEN, tmp_path)
    with pytest.raises(StartupError, match="two copies"):
        size_burst(NAMED.model_copy(update={"workers": 1}), CHOSEN, shipped_folder())


def test_a_drop_and_a_restore_are_seen_by_the_workers_reports() -> None:
    sight = Sight()
    for now_s, name, num_blocks, num_stages, stage in (
        (0.0, "a", 100, 1, 0),
        (0.1, "b", 100, 1, 0),
        (1.0, "a", 300, 2, 0),
        (1.1, "a", 300, 2, 0),  # its member has yet to say so: 100 blocks of it are no more
        (1.2, "b", 0, 2, 1),
        (9.0, "a", 100, 1, 0),
        (9.2, "b", 100, 1, 0),
        (9.5, "a", 100, 1, 0),
    ):
        sight.note(report(name, num_blocks, num_stages, stage), now_s)
    assert (sight.num_tokens_before, sight.num_tokens_dropped) == (3200, 4800)
    assert (sight.dropped_s, sight.restored_s) == (1.0, 9.2)
    assert sight.describe() == "KV   0% of 3200 tokens · layers a 0-4 b 0-4"


def test_what_readers_went_through_is_said_whatever_it_is() -> None:
    readers = [
        BurstReader(has_begun=True, num_tokens=10, qoe=1.0, ttft_s=0.5, delivered_gap_s=3.0, displayed_gap_s=0.25),
        BurstReader(has_begun=True, num_tokens=20, qoe=0.5, ttft_s=4.0, delivered_gap_s=0.1, displayed_gap_s=1.5),
        BurstReader(failure="broken off"),
    ]
    assert describe_burst(readers, Sight(), Pacing("reading")) == [
        "2 readers, 30 tokens: QoE 0.75, at least 0.50; first token within 4.0 s",
        "longest gap: delivered 3.00 s, displayed 1.50 s; a token each 0.21 s is reading speed",
        "1 of 3 readers got no whole answer: broken off",
    ]
    sight = Sight(num_tokens_before=3200, num_tokens_dropped=4800, dropped_s=1.0)
    said = "layers dropped after 1.0 s, KV memory from 3200 to 4800 tokens; "
    assert describe_burst([], sight, Pacing())[0] == f"{said}not restored yet"
    sight.restored_s = 9.0
    assert describe_burst([], sight, Pacing())[0] == f"{said}restored after 9.0 s"


class FakeBurst(Burst):
    def __init__(self) -> None:
        self.asked: list[int] = []

    @property
    def num_reading(self) -> int:
        return 0

    def describe(self) -> str:
        return "nobody"

    def fill(self, num_readers: int) -> None:
        self.asked.append(num_readers)


@pytest.mark.virtual_time
async def test_readers_come_until_layers_are_dropped_then_few_and_none_once_they_are_back() -> None:
    sight, fake, loop = Sight(), FakeBurst(), asyncio.get_running_loop()
    began_s = loop.time()
    going = asyncio.create_task(burst.go_on(fake, sight, Console(), began_s))
    for at_s, num_stages in ((0.1, 1), (5.0, 2), (20.0, 1)):
        await asyncio.sleep(began_s + at_s - loop.time())
        sight.note(report("a", 1600, num_stages), at_s)
    await going
    many, few = round(burst.MANY * 100), round(burst.FEW * 100)
    assert [count for count in dict.fromkeys(fake.asked) if count] == [many, few]
    assert loop.time() - began_s < 21
    assert fake.asked.count(few) > 50


@pytest.mark.virtual_time
async def test_if_no_layers_are_dropped_it_ends_by_a_limit() -> None:
    sight, loop = Sight(), asyncio.get_running_loop()
    began_s = loop.time()
    await burst.go_on(FakeBurst(), sight, Console(), began_s)
    assert burst.DROP_LIMIT_S < loop.time() - began_s < burst.DROP_LIMIT_S + 1
    assert sight.dropped_s is None
