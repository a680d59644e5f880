"""A scenario file that is small enough for tests, and still runs out of memory."""

from __future__ import annotations

from pathlib import Path

SMALL = """\
model = "llama-3-8b"
gpu = "a100"
instances = 2
lengths = "200x60"
duration_s = 6
kv_tokens = 2000
max_batch_tokens = 512
systems = ["fcfs", "fcfs-chunked"]

[arrivals]
kind = "one-burst"
rate_per_s = 12.0
factor = 4.0
burst_start_s = 2
burst_end_s = 4

[reader]
kind = "andes"

[slo]
ttft_s = 0.5
tpot_s = 0.05
"""


def small_scenario(folder: Path, name: str = "small") -> Path:
    """Write the scenario into the folder and return its file."""
    path = folder / f"{name}.toml"
    path.write_text(SMALL)
    return path
