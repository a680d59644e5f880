"""An installation without compiler and without library: a worker starts by itself on torch's operators and says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.checkpoints import CheckpointShape, greedy_text, stored_checkpoint
from tests.support.cluster import ROOT, cluster
from tests.support.processes import wait_until

pytestmark = pytest.mark.kernels

SHAPE = CheckpointShape(seed=7)
PROMPT = list(range(10, 60))
NUM_TOKENS = 24


def code_without_library(folder: Path) -> Path:
    """Copy the code as a checkout has it, in which nothing was built."""
    for package in ("cli", "services", "shared"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    return folder


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_without_compiler_and_library_a_worker_serves_by_torch_and_says_so(tmp_path: Path) -> None:
    code, logs, nothing = code_without_library(tmp_path / "code"), tmp_path / "logs", tmp_path / "nothing"
    nothing.mkdir()
    env = {"PATH": str(nothing), "SLUICE_WORKER_KERNELS": "auto"}
    build = [sys.executable, "-m", "services.worker.native.build"]
    built = subprocess.run(build, cwd=code, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    assert "no C++ compiler" in built.stderr
    assert not (code / "services/worker/native/lib").exists()
    folder, reference = stored_checkpoint(SHAPE)
    flags = ("--model", str(folder), "--served-model-name", "tiny", "--memory", "96MiB", "--workers", "1")
    with cluster(*flags, "--log-dir", str(logs), env=env, root=code) as running:
        assert [report["kernels"] for report in running.reports()] == ["torch"]
        wait_until(lambda: "no library is built for this processor" in running.log.read_text(), "the person hears it")
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        text = running.post("/v1/completions", body)["choices"][0]["text"]
        expected = greedy_text(reference, PROMPT, NUM_TOKENS)
        assert text == Tokenizer.from_file(str(folder / "tokenizer.json")).decode(expected)
    said = [json.loads(line) for line in (logs / "worker-0.log").read_text().splitlines() if line.startswith("{")]
    assert [entry["kernels"] for entry in said if entry["event"] == "model loaded"] == ["torch"]
