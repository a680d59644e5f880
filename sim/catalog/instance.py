"""What one instance of a model on some GPUs is: its cost per step, its memory, its links.

    KV tokens = (USABLE_SHARE · memory · tp - parameters - RESERVE_BYTES · tp) / KV bytes per token

One A800 with Qwen2.5-14B: (0.9 · 80 - 29.5 - 2) GB / 192 KiB = 206 K tokens, and its parameters are worth 150 K more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from shared.cost import CostModel, Profile, load_profile, profile_names
from shared.errors import StartupError
from sim.catalog.facts import CatalogModel, GpuFacts, find_gpu, find_model, gpus, models

USABLE_SHARE: Final = 0.9
"""Share of the GPU's memory that a server uses, as vLLM's `gpu_memory_utilization`."""
RESERVE_BYTES: Final = 2_000_000_000
"""Per GPU, for what is neither parameters nor KV: activations, workspaces, graphs."""
_PROFILE: Final = re.compile(r"(?P<model>.+)-tp(?P<tp>\d+)-(?P<gpu>[^-]+)")


@dataclass(frozen=True, slots=True)
class CatalogInstance:
    """One copy of a model on `tp` GPUs. Sizes and rates are of the whole instance, all its GPUs together."""

    name: str
    """As `qwen2.5-14b-tp1-a800`."""
    model: str
    gpu: str
    tp: int
    """GPUs of the instance (tensor parallel)."""
    cost: CostModel
    """Duration of a step, without the imitated engine's CPU time (`era_s` = 0)."""
    kv_bytes_per_token: int
    """K and V of one token in all layers."""
    parameter_bytes: int
    """One copy of the weights."""
    kv_tokens: int
    """Token slots that the KV memory holds."""
    memory_bytes: int
    """Device memory."""
    num_layers: int
    activation_bytes_per_token: int
    """Hidden state of one token between two layers."""
    host_link_bytes_per_s: float
    """To host memory, one direction."""
    network_bytes_per_s: float
    """To another machine, one direction."""
    provenance: str
    """Where cost and sizes come from, and what was scaled."""

    def stage_kv_tokens(self, num_layers: int) -> int:
        """Return the token slots of an instance that holds only so many layers: of their KV.

        Embedding and head count as spread evenly over the layers.
        """
        share = num_layers / self.num_layers
        free_bytes = self.kv_tokens * self.kv_bytes_per_token + self.parameter_bytes * (1 - share)
        return int(free_bytes / (self.kv_bytes_per_token * share))


def find_instance(model: str, gpu: str, *, tp: int | None = None) -> CatalogInstance:
    """Return the facts of one instance.

    Args:
        model: name in the catalogue, `qwen2.5-14b`.
        gpu: name in the catalogue, `a800`.
        tp: GPUs per instance; None takes the fewest for which there is a cost profile and that hold the model.

    Raises:
        StartupError: there is no such model or GPU, no cost profile for the pair, or the model does not fit.
    """
    model, model_facts = find_model(model)
    gpu, gpu_facts = find_gpu(gpu)
    profiles = _profiles(model, gpu_facts)
    if not profiles or (tp is not None and tp not in profiles):
        cards = gpu if tp is None else f"{tp} x {gpu}"
        raise StartupError(f"there is no cost profile of {model} on {cards}", _known_pairs(model))
    found = [_instance(model, gpu, count, profiles[count]) for count in ([tp] if tp else sorted(profiles))]
    fitting = [instance for instance in found if instance.kv_tokens > 0]
    if not fitting:
        needed_gb, tried = model_facts.parameter_bytes / 1e9, " or ".join(str(instance.tp) for instance in found)
        raise StartupError(
            f"{model} ({needed_gb:.0f} GB of parameters) leaves no KV memory on {tried} x {gpu}",
            "Name a GPU with more memory, or more of them per instance",
        )
    return fitting[0]


def num_kv_tokens(model: CatalogModel, gpu: GpuFacts, tp: int) -> int:
    """Return how many tokens the KV memory of an instance holds; 0 or less if the parameters alone do not fit."""
    free_bytes = USABLE_SHARE * gpu.memory_bytes * tp - model.parameter_bytes - RESERVE_BYTES * tp
    return int(free_bytes // model.kv_bytes_per_token)


def _instance(model: str, gpu: str, tp: int, profile: Profile) -> CatalogInstance:
    model_facts, gpu_facts = models()[model], gpus()[gpu]
    cost, provenance = profile.cost, f"cost: {profile.name}, {profile.source}"
    if gpu_facts.scaled_from is not None:
        cost = scaled_cost(cost, gpus()[gpu_facts.scaled_from], gpu_facts)
        provenance += f", scaled to {gpu_facts.title} by bandwidth and arithmetic of the data sheets"
    return CatalogInstance(
        name=f"{model}-tp{tp}-{gpu}",
        model=model,
        gpu=gpu,
        tp=tp,
        cost=cost,
        kv_bytes_per_token=model_facts.kv_bytes_per_token,
        parameter_bytes=model_facts.parameter_bytes,
        kv_tokens=num_kv_tokens(model_facts, gpu_facts, tp),
        memory_bytes=gpu_facts.memory_bytes * tp,
        num_layers=model_facts.num_layers,
        activation_bytes_per_token=model_facts.hidden_size * model_facts.bytes_per_parameter,
        host_link_bytes_per_s=gpu_facts.host_link_gb_per_s * 1e9 * tp,
        network_bytes_per_s=gpu_facts.network_gb_per_s * 1e9 * tp,
        provenance=f"{provenance}; model: {model_facts.source}; GPU: {gpu_facts.source}",
    )


def scaled_cost(cost: CostModel, measured: GpuFacts, target: GpuFacts) -> CostModel:
    """Return the cost on another card: what memory bounds by the ratio of bandwidths, the rest by that of arithmetic.

    A profile with one branch (g1 = b1 = 0) was fitted over both regimes: its slope per token counts as arithmetic.
    Communication between the GPUs of an instance is in g0 and b0, and scales with them, for want of a better figure.
    """
    memory = measured.memory_gb_per_s / target.memory_gb_per_s
    compute = measured.half_tflop_per_s / target.half_tflop_per_s
    has_two_branches = cost.g1_s > 0 or cost.b1_s > 0
    return replace(
        cost,
        g0_s=cost.g0_s * memory,
        b0_s=cost.b0_s * (memory if has_two_branches else compute),
        g1_s=cost.g1_s * compute,
        b1_s=cost.b1_s * compute,
        d_s=cost.d_s * memory,
        a_s=cost.a_s * compute,
    )


def _profiles(model: str, gpu: GpuFacts) -> dict[int, Profile]:
    """Return the cost profiles that hold for the pair, or will after scaling, by GPUs per instance."""
    source = gpu if gpu.scaled_from is None else gpus()[gpu.scaled_from]
    found: dict[int, Profile] = {}
    for suffix in source.cost_profiles:
        for tp in sorted(_tps(model, suffix) - found.keys()):
            profile = load_profile(f"{model}-tp{tp}-{suffix}")
            found[tp] = replace(profile, cost=replace(profile.cost, era_s=0.0))
    return found


def _tps(model: str, suffix: str) -> set[int]:
    parsed = [match for name in profile_names() if (match := _PROFILE.fullmatch(name))]
    return {int(match["tp"]) for match in parsed if match["model"] == model and match["gpu"] == suffix}


def _known_pairs(model: str) -> str:
    pairs = [
        f"{tp} x {name}"
        for name, facts in gpus().items()
        for tp in sorted(_profiles(model, facts))
        if num_kv_tokens(models()[model], facts, tp) > 0
    ]
    return f"For {model} there are {', '.join(pairs)}" if pairs else "Name a model for which there is one"
