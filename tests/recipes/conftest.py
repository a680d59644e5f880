"""Where the recipes of docs/recipes.md are run: a cluster, a server of pages, and an environment with the libraries."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.recipes import LIBRARIES, SITE, STORY, TEXT, post, text_of

LIMIT_S = 120.0


@pytest.fixture(scope="session", autouse=True)
def libraries() -> Path:
    """Folder of the environment; that it is not there is a failure, nothing to skip for."""
    if not (LIBRARIES / ".made").exists():
        pytest.fail(f"there is no whole {LIBRARIES.name}, which `make test-recipes` makes", pytrace=False)
    return LIBRARIES


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Host and port of the server that the page tells to start, and the folder that it serves."""
    folder = tmp_path_factory.mktemp("site")
    (line,) = re.findall(r"`(python3 -m http\.server [^`]*)`", TEXT)
    words = shlex.split(line.replace(SITE.partition(":")[2], "0"))
    with subprocess.Popen(
        [sys.executable, "-u", *words[1:]], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            port = re.search(r" port (\d+) ", server.stdout.readline())
            assert port is not None
            yield f"127.0.0.1:{port[1]}", folder
        finally:
            server.kill()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, site: tuple[str, Path]) -> Iterator[str]:
    """Host and port of what the page tells to start for a browser, at a free port, and alike however it batches."""
    (line,) = re.findall(r"`sluice (up --allow-origin [^`]*)`", TEXT)
    words = shlex.split(line.replace(SITE, site[0]))
    log_file = tmp_path_factory.mktemp("cluster") / "log"
    with (
        log_file.open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "cli.main", *words, "--port", "0", "--json"],
            env={**os.environ, "SLUICE_DETERMINISTIC": "true"},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as up,
    ):
        assert up.stdout is not None
        try:
            line = up.stdout.readline()
            assert line, log_file.read_text()
            yield json.loads(line)["url"].removeprefix("http://")
            up.send_signal(signal.SIGINT)
            assert up.wait(LIMIT_S) == 0, log_file.read_text()
        finally:
            up.kill()


@pytest.fixture(scope="session")
def story(cluster: str) -> str:
    """What the model tells to the request of every recipe."""
    status, _, answer = post(cluster, STORY)
    assert status == 200, answer
    assert len(text_of(answer)) > 100
    return text_of(answer)
