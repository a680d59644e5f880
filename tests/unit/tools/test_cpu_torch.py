"""Which build of torch is installed, by what pip chooses from indexes of this test's own."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.fake_services import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a build for CUDA")
VERSION = "2.13.0"


class Indexes:
    """Two indexes in folders, as pip reads them by `file:` URLs, and a virtual environment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pip = (sys.executable, "-m", "pip", "--python", str(root / "venv" / "bin" / "python"))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True)
        (root / "constraints.txt").write_text(f"other==1\ntorch=={VERSION}\n")
        for index in ("pips", "makers"):
            (root / index).mkdir()

    def add(self, index: str, name: str, version: str, *requires: str) -> None:
        """Put a wheel there that holds nothing, and refresh the list of its project."""
        folder, info = self.root / index / name, f"{name}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", "\n".join(metadata) + "\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        links = [f'<a href="{path.name.replace("+", "%2B")}">{path.name}</a>' for path in folder.glob("*.whl")]
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run with these indexes and no others."""
        env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": (self.root / "pips").as_uri(), "PIP_NO_CACHE_DIR": "1"}
        env |= {"TORCH_INDEX_URL": (self.root / "makers").as_uri(), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return subprocess.run(command, env=env, cwd=self.root, capture_output=True, text=True, check=False)

    def install(self) -> subprocess.CompletedProcess[str]:
        """Install as `make demo` does: torch, then what needs it; return what came of the first."""
        first = self.run("sh", str(ROOT / "docker" / "cpu_torch.sh"), *self.pip)
        if first.returncode == 0:
            done = self.run(*self.pip, "install", "-c", "constraints.txt", "torch>=2.9", "needstorch")
            assert done.returncode == 0, done.stderr
        return first

    def installed(self) -> set[str]:
        """Return what is installed, `name==version`."""
        return set(self.run(*self.pip, "list", "--format=freeze").stdout.split())


@pytest.fixture
def indexes(tmp_path: Path) -> Indexes:
    """Pip's own index has torch for CUDA, which needs gigabytes more, and what needs any torch."""
    made = Indexes(tmp_path)
    made.add("pips", "torch", VERSION, "cudalibraries")
    made.add("pips", "cudalibraries", "1")
    made.add("pips", "sums", "1")
    made.add("pips", "needstorch", "1", "torch")
    return made


@pytest.mark.slow
def test_where_pips_index_has_torch_for_cuda_alone_its_makers_index_is_asked_for_torch_alone(indexes: Indexes) -> None:
    """What torch needs is not taken from there, newer as it may be."""
    indexes.add("makers", "torch", f"{VERSION}+cpu", "sums")
    indexes.add("makers", "torch", "2.14.0+cpu", "sums")
    indexes.add("makers", "sums", "2")
    said = indexes.install()
    assert f"taking it from {(indexes.root / 'makers').as_uri()}" in said.stdout
    assert indexes.installed() == {f"torch=={VERSION}+cpu", "sums==1", "needstorch==1"}
    assert indexes.install().stdout == "", "it is there"


@pytest.mark.slow
def test_a_mirror_that_has_the_build_for_cpus_is_enough(indexes: Indexes) -> None:
    indexes.add("pips", "torch", f"{VERSION}+cpu", "sums")
    assert "taking it from" not in indexes.install().stdout
    assert indexes.installed() == {f"torch=={VERSION}+cpu", "sums==1", "needstorch==1"}


@pytest.mark.slow
def test_without_a_build_for_cpus_nothing_is_installed(indexes: Indexes) -> None:
    """It would be the one for CUDA. Who has installed that keeps it."""
    refused = indexes.install()
    assert (refused.returncode, indexes.installed()) == (1, set())
    assert f"Name an index that has torch=={VERSION}+cpu by TORCH_INDEX_URL" in refused.stderr
    indexes.run(*indexes.pip, "install", f"torch=={VERSION}")
    assert indexes.install().returncode == 0
    assert indexes.installed() == {f"torch=={VERSION}", "cudalibraries==1", "needstorch==1"}
