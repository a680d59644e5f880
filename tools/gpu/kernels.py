"""Compiles FlashInfer's kernels for Hopper where there is no GPU, and puts them into its wheel.

    python -m tools.gpu.wheels FOLDER --python 3.12 --have FREEZE
    python -m tools.gpu.kernels FOLDER [--head-dims 64 128] [--dtypes bfloat16] [--cache CACHE]

Then as `wheels` says. FlashInfer takes a kernel from its own folder `data/aot` before it asks for a compiler: nothing
has to be set on the GPU machine, and nothing is compiled there but other kinds of attention, which
FLASHINFER_DISABLE_JIT=1 refuses instead.

The wheel is for Linux on x86-64, devices of compute capability 9.0 and CUDA 13 then. CUDA's compiler comes from its
wheels into CACHE, with everything else that is needed here, unless CUDA_HOME names one. What was compiled stays in
CACHE; one kind takes minutes (MAX_JOBS says how many files at once).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import itertools
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, Final

from tools.gpu.wheels import pinned

TOOLKIT: Final = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-curand": "10.4.0.35",
}
"""CUDA's compiler, and what the kernels include and are linked with."""
BESIDE: Final = (
    "apache-tvm-ffi click einops filelock ninja nvidia-ml-py tabulate tqdm",
    "requests urllib3 certifi charset-normalizer",
)
"""What FlashInfer imports beside what Sluice needs, and what builds."""
ARCHITECTURE: Final = "9.0a"
AOT: Final = "flashinfer/data/aot"
"""Where FlashInfer looks for kernels first, in the wheel."""


def build(dtype: str, head_dim: int, backend: str, *, windows: bool) -> Path:
    """Return the library that FlashInfer compiles for the calls of `flashinfer_paged.py` with one kind of layer."""
    torch: Any = importlib.import_module("torch")
    prefill: Any = importlib.import_module("flashinfer.prefill")
    make = prefill._gen_batch_prefill_primary_module if backend == "fa2" else prefill.gen_batch_prefill_module
    kind = getattr(torch, dtype)
    spec = make(backend, kind, kind, kind, torch.int32, head_dim, head_dim, 0, windows, False, False)
    spec.build()
    return Path(spec.jit_library_path)


def build_all(dtypes: list[str], head_dims: list[int], backends: list[str]) -> None:
    """Compile kinds of kernels, one after the other; print the paths of their libraries."""
    for dtype, head_dim, windows, backend in itertools.product(dtypes, head_dims, (False, True), backends):
        began = time.monotonic()
        library = build(dtype, head_dim, backend, windows=windows)
        took, size = time.monotonic() - began, library.stat().st_size
        print(f"# {backend} {dtype} {head_dim} {windows=}: {took:.0f} s, {size} bytes", file=sys.stderr, flush=True)
        print(library, flush=True)


def install(target: Path, *requirements: str) -> None:
    """Unpack wheels into a folder, without what they need."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--upgrade"]
    subprocess.run([*command, "--target", str(target), *requirements], check=True)


def toolkit(folder: Path) -> Path:
    """Return a folder like CUDA's own, made of its wheels; the driver's library has nothing in it."""
    home = folder / "nvidia" / "cu13"
    if not home.exists():
        install(folder, *(f"{name}=={version}" for name, version in TOOLKIT.items()))
    (home / "lib64").unlink(missing_ok=True)
    (home / "lib64").symlink_to("lib")
    (home / "lib" / "libcudart.so").unlink(missing_ok=True)
    (home / "lib" / "libcudart.so").symlink_to("libcudart.so.13")
    (home / "lib" / "stubs").mkdir(exist_ok=True)
    stub = home / "lib" / "stubs" / "libcuda.so"
    command = ["cc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o", str(stub)]
    subprocess.run(command, check=True)
    return home


def libraries(wheel: Path, cache: Path, arguments: list[str]) -> list[Path]:
    """Compile by FlashInfer as it is in a wheel; return the libraries."""
    beside = (f"{name}=={pinned()[name]}" if name in pinned() else name for name in " ".join(BESIDE).split())
    install(cache / "site", str(wheel), *beside)
    home = os.environ.get("CUDA_HOME") or str(toolkit(cache / "cuda"))
    environment = os.environ | {
        "CUDA_HOME": home,
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURE,
        "FLASHINFER_WORKSPACE_BASE": str(cache),
        "PATH": f"{cache / 'site' / 'bin'}:{home}/bin:{os.environ['PATH']}",
        "PYTHONPATH": str(cache / "site"),
    }
    command = [sys.executable, "-m", "tools.gpu.kernels", "--build", *arguments]
    result = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return [Path(line) for line in result.stdout.splitlines() if line.endswith(".so")]


def add(wheel: Path, found: list[Path]) -> None:
    """Put libraries into FlashInfer's wheel, stripped, beside those of other kinds that it has already."""
    with zipfile.ZipFile(wheel) as whole:
        files = {info.filename: whole.read(info) for info in whole.infolist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    lines = {line.split(",")[0]: line for line in files[record].decode().splitlines()}
    for library in found:
        stripped = library.with_suffix(".stripped")
        subprocess.run(["strip", "-o", str(stripped), str(library)], check=True)
        content, name = stripped.read_bytes(), f"{AOT}/{library.stem}/{library.name}"
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        files[name], lines[name] = content, f"{name},sha256={digest},{len(content)}"
    files[record] = "\n".join((*lines.values(), "")).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as whole:
        for name, content in files.items():
            whole.writestr(name, content)


def main() -> None:
    """Compile, and put what came of it into the wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="with FlashInfer's wheel")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128], choices=(64, 128, 256))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"], choices=("bfloat16", "float16"))
    parser.add_argument("--backends", nargs="+", default=["fa2", "fa3"], choices=("fa2", "fa3"))
    parser.add_argument("--cache", type=Path, default=Path(".sluice/flashinfer"), help="what is fetched and compiled")
    parser.add_argument(
        "--build", action="store_true", help="only compile, by the FlashInfer and the CUDA of this process"
    )
    arguments = parser.parse_args()
    if arguments.build:
        build_all(arguments.dtypes, arguments.head_dims, arguments.backends)
        return
    if arguments.folder is None:
        parser.error("the folder with FlashInfer's wheel is missing")
    wheel = next(arguments.folder.glob("flashinfer_python-*.whl"))
    kinds = ["--head-dims", *map(str, arguments.head_dims), "--dtypes", *arguments.dtypes]
    kinds += ["--backends", *arguments.backends]
    add(wheel, libraries(wheel, arguments.cache.resolve(), kinds))
    size = sum(each.stat().st_size for each in arguments.folder.glob("*.whl"))
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, all wheels {size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
