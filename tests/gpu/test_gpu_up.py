"""`sluice up` without a word about the device: a card is used where there is one, and its memory is not overdrawn."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from tests.support.gpu import WITH_LIBRARIES
from tests.support.processes import sluice

pytestmark = WITH_LIBRARIES


def test_a_card_is_used_where_there_is_one_and_workers_share_nine_tenths_of_it(tmp_path: Path) -> None:
    free = int(torch.cuda.mem_get_info(0)[0])
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    started = sluice("up", "-d", "--port", "0", "--workers", "2", env=env)
    assert started.returncode == 0, started.stderr
    try:
        assert "chosen: device cuda, dtype bfloat16, memory " in started.stderr
        view = json.loads(sluice("status", "--json", env=env).stdout)
        workers = [each["report"] for each in view["workers"]]
        assert [each["device"].partition(":")[0] for each in workers] == ["cuda", "cuda"]
        num_cards = torch.cuda.device_count()
        assert all(each["memory_bytes"] <= 0.9 * free * num_cards / max(2, num_cards) for each in workers)
        assert sluice("chat", "--pace", "off", "Tell me a story.", env=env).stdout.strip()
    finally:
        ended = sluice("down", env=env)
    assert ended.returncode == 0, ended.stderr
