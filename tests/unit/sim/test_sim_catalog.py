from __future__ import annotations

import pytest

from services.worker.kv_moves.kv_table import MAX_EXCHANGED
from shared.cost import CostModel, load_profile, prefill_pairs
from shared.errors import StartupError
from sim.catalog.facts import GpuFacts, gpus, models
from sim.catalog.instance import find_instance, scaled_cost

A800 = find_instance("qwen2.5-14b", "a800")


def test_the_step_times_of_the_paper_s_model_on_its_card() -> None:
    """KunServe's typical prefill and decode: 2 048 tokens in 225.7 ms; 128 decodes over 243 K tokens in 59.4 ms."""
    assert A800.cost.step_s(2048, 0, prefill_pairs(0, 2048)) == pytest.approx(0.2257, rel=0.01)
    assert A800.cost.step_s(128, 243_000, 0) == pytest.approx(0.0594, rel=0.01)
    assert A800.cost.era_s == 0


def test_one_a800_holds_206_k_tokens_beside_the_model() -> None:
    assert A800.kv_bytes_per_token == 192 * 1024
    assert A800.kv_tokens == pytest.approx(206_000, rel=0.005)
    assert A800.parameter_bytes / A800.kv_bytes_per_token == pytest.approx(150_000, rel=0.005)


@pytest.mark.parametrize(("group", "percent"), [(2, 36), (4, 55), (8, 64)])
def test_what_a_drop_by_groups_adds(group: int, percent: float) -> None:
    """A group of g keeps one copy: each of its GPUs frees (g - 1)/g of the parameters."""
    freed_tokens = A800.parameter_bytes * (group - 1) / group / A800.kv_bytes_per_token
    assert 100 * freed_tokens / A800.kv_tokens == pytest.approx(percent, abs=0.6)


def _gated(
    layers: int,
    hidden: int,
    kv: int,
    inner: int,
    vocabulary: int,
    *,
    queries: int = 0,
    extra: int = 0,
    tied: bool = False,
) -> int:
    """Parameters of a Llama-like decoder; kv and queries are widths, extra what each layer has of biases and norms."""
    attention = 2 * hidden * (queries or hidden) + 2 * hidden * kv + extra
    outer = (1 if tied else 2) * vocabulary * hidden
    return outer + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden


def _qwen2(layers: int, hidden: int, kv: int, inner: int, vocabulary: int, *, tied: bool = False) -> int:
    """The same with biases of queries, keys and values."""
    return _gated(layers, hidden, kv, inner, vocabulary, extra=hidden + 2 * kv, tied=tied)


def _qwen3(layers: int, hidden: int, heads: int, inner: int, *, tied: bool = False) -> int:
    """The same with heads of 128, 8 of them of keys, and norms of queries and keys."""
    return _gated(layers, hidden, 1024, inner, 151_936, queries=128 * heads, extra=256, tied=tied)


def _opt(layers: int, hidden: int) -> int:
    """OPT: tied embedding, 2 050 positions, two plain matrices of the feed-forward, biases and norms of two vectors."""
    layer = 4 * hidden * (hidden + 1) + 8 * hidden * hidden + 5 * hidden + 4 * hidden
    return hidden * (50_272 + 2_050 + 2) + layers * layer


ARCHITECTURES = {
    "llama-2-7b": _gated(32, 4096, 4096, 11_008, 32_000),
    "llama-2-13b": _gated(40, 5120, 5120, 13_824, 32_000),
    "llama-3-8b": _gated(32, 4096, 1024, 14_336, 128_256),
    "llama-3-70b": _gated(80, 8192, 1024, 28_672, 128_256),
    "llama-3.2-1b": _gated(16, 2048, 512, 8192, 128_256, tied=True),
    "llama-3.2-3b": _gated(28, 3072, 1024, 8192, 128_256, tied=True),
    "tinyllama-1.1b": _gated(22, 2048, 256, 5632, 32_000),
    "mistral-7b": _gated(32, 4096, 1024, 14_336, 32_768),
    "mistral-nemo-12b": _gated(40, 5120, 1024, 14_336, 131_072, queries=4096),
    "mistral-small-24b": _gated(40, 5120, 1024, 32_768, 131_072, queries=4096),
    "qwen2.5-0.5b": _qwen2(24, 896, 128, 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 256, 8960, 151_936, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 256, 11_008, 151_936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 512, 18_944, 152_064),
    "qwen2.5-14b": _qwen2(48, 5120, 1024, 13_824, 152_064),
    "qwen2.5-32b": _qwen2(64, 5120, 1024, 27_648, 152_064),
    "qwen2.5-72b": _qwen2(80, 8192, 1024, 29_568, 152_064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "phi-3-mini": _gated(32, 3072, 3072, 8192, 32_064),
    "phi-3-medium": _gated(40, 5120, 1280, 17_920, 32_064),
    "phi-4": _gated(40, 5120, 1280, 17_920, 100_352),
    "opt-125m": _opt(12, 768),
    "opt-1.3b": _opt(24, 2048),
    "opt-6.7b": _opt(32, 4096),
    "opt-13b": _opt(40, 5120),
    "opt-30b": _opt(48, 7168),
}


def test_parameters_are_those_of_the_architectures() -> None:
    assert {name: model.num_parameters for name, model in models().items()} == ARCHITECTURES


@pytest.mark.parametrize(
    ("model", "kib"),
    [
        ("llama-2-7b", 512),
        ("llama-2-13b", 800),
        ("llama-3-8b", 128),
        ("llama-3-70b", 320),
        ("opt-13b", 800),
        ("opt-30b", 1344),
    ],
)
def test_kv_of_one_token(model: str, kib: int) -> None:
    assert models()[model].kv_bytes_per_token == kib * 1024


def test_a_whole_instance_has_the_memory_and_links_of_all_its_gpus() -> None:
    instance = find_instance("qwen2.5-72b", "a800")
    assert (instance.name, instance.tp) == ("qwen2.5-72b-tp4-a800", 4)
    assert instance.memory_bytes == 4 * A800.memory_bytes == 320_000_000_000
    assert instance.host_link_bytes_per_s == 4 * A800.host_link_bytes_per_s
    assert instance.network_bytes_per_s == 4 * A800.network_bytes_per_s == 100e9
    assert instance.kv_tokens * instance.kv_bytes_per_token == pytest.approx(
        0.9 * 320e9 - instance.parameter_bytes - 4 * 2e9, rel=1e-5
    )


def test_the_fewest_gpus_that_hold_the_model_are_taken() -> None:
    """70 B parameters are 141 GB: four cards of 80 GB hold them, four of 40 GB do not."""
    assert find_instance("llama-3-70b", "a100").tp == 4
    assert find_instance("llama-3-70b", "a100", tp=8).tp == 8
    assert find_instance("llama-3-70b", "a100-40").tp == 8


def test_cards_that_were_measured_have_the_profile_itself() -> None:
    assert find_instance("qwen2.5-14b", "a100").cost == A800.cost == load_profile("qwen2.5-14b-tp1-a800").cost
    assert find_instance("llama-3-8b", "h200").cost == load_profile("llama-3-8b-tp1-h200").cost


def _gpu(memory_gb_per_s: float, half_tflop_per_s: float) -> GpuFacts:
    return gpus()["a100"].model_copy(update={"memory_gb_per_s": memory_gb_per_s, "half_tflop_per_s": half_tflop_per_s})


def test_cost_scales_by_what_bounds_it() -> None:
    """Half the bandwidth doubles what memory bounds, a third of the arithmetic triples the rest."""
    cost = CostModel(g0_s=1, b0_s=2, g1_s=3, b1_s=4, d_s=5, a_s=6)
    assert scaled_cost(cost, _gpu(2000, 300), _gpu(1000, 100)) == CostModel(2, 4, 9, 12, 10, 18)
    one_branch = CostModel(g0_s=1, b0_s=2, g1_s=0, b1_s=0, d_s=5, a_s=6)
    assert scaled_cost(one_branch, _gpu(2000, 300), _gpu(1000, 100)) == CostModel(2, 6, 0, 0, 10, 18)


def test_scaled_cards_say_so() -> None:
    """A100 40 GB: 2039 / 1555 = 1.311 times what memory bounds; RTX 4090: 312 / 165.2 = 1.889 times the arithmetic."""
    a100, a100_40 = (find_instance("opt-13b", gpu) for gpu in ("a100", "a100-40"))
    assert a100_40.cost.g0_s / a100.cost.g0_s == pytest.approx(1.311, abs=0.001)
    assert a100_40.cost.b1_s == a100.cost.b1_s
    assert "scaled to A100 40 GB" in a100_40.provenance
    assert "scaled" not in a100.provenance
    small = find_instance("llama-2-7b", "rtx4090")
    assert small.cost.b1_s / find_instance("llama-2-7b", "a100").cost.b1_s == pytest.approx(1.889, abs=0.001)
    assert 0 < small.kv_tokens < 12_000


@pytest.mark.parametrize("gpu", sorted(gpus()))
@pytest.mark.parametrize("model", sorted(models()))
def test_every_pair_is_an_instance_or_says_what_there_is(model: str, gpu: str) -> None:
    try:
        instance = find_instance(model, gpu)
    except StartupError as error:
        assert "no cost profile" in str(error) or "no KV memory" in str(error)  # noqa: PT017  either end is right
    else:
        assert instance.kv_tokens > 0
        assert instance.parameter_bytes < instance.memory_bytes
        assert 2 * instance.kv_tokens // 16 < MAX_EXCHANGED, "a group of two that forms keeps all of its KV"


@pytest.mark.parametrize(
    ("model", "gpu", "tp", "message"),
    [
        ("qwen2.5-14", "a800", None, "no model 'qwen2.5-14'. Did you mean qwen2.5-14b? There are llama-2-7b, "),
        ("qwen2.5-14b", "A80", None, "no GPU 'a80'. Did you mean a800? There are a100, "),
        ("gpt", "a800", None, "no model 'gpt'. There are llama-2-7b, "),
        ("qwen2.5-14b", "a800", 3, "no cost profile of qwen2.5-14b on 3 x a800. For qwen2.5-14b there are 1 x a100, "),
        ("llama-2-13b", "rtx4090", None, "llama-2-13b (26 GB of parameters) leaves no KV memory on 1 x rtx4090"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(model: str, gpu: str, tp: int | None, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        find_instance(model, gpu, tp=tp)
    assert message in str(caught.value)


def test_capital_letters_do_not_matter() -> None:
    assert find_instance("Qwen2.5-14B", "A800") == A800
