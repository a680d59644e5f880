from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.process.metrics import MAX_LABEL_CHARS, OTHER, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return what a scraper reads, by (name, labels)."""
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_names_with_a_colon_are_read_back_as_written() -> None:
    metrics = Metrics()
    metrics.gauge("vllm:num_requests_running", "Requests that run.", ["model_name"]).set(3, model_name="demo")
    metrics.counter("vllm:prompt_tokens_total", "Tokens.").inc(5)
    metrics.counter("sluice:nats_gaps", "Gaps.").inc()
    metrics.histogram("sluice:qoe", "QoE of a finished stream.", buckets=(0.5, 0.95)).observe(0.7)
    found = samples(metrics)
    assert found == {
        ("vllm:num_requests_running", (("model_name", "demo"),)): 3,
        ("vllm:prompt_tokens_total", ()): 5,
        ("sluice:nats_gaps_total", ()): 1,
        ("sluice:qoe_bucket", (("le", "0.5"),)): 0,
        ("sluice:qoe_bucket", (("le", "0.95"),)): 1,
        ("sluice:qoe_bucket", (("le", "+Inf"),)): 1,
        ("sluice:qoe_count", ()): 1,
        ("sluice:qoe_sum", ()): 0.7,
    }


def test_types_are_declared_for_the_scraper() -> None:
    metrics = Metrics()
    metrics.counter("sluice:shed", "Refused.")
    metrics.gauge("sluice:kv_bytes", "Bytes.")
    metrics.histogram("sluice:stall_seconds", "Seconds.")
    text = metrics.render()[0].decode()
    types = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert types == {
        "sluice:shed_total": "counter",
        "sluice:kv_bytes": "gauge",
        "sluice:stall_seconds": "histogram",
    }


def test_gauges_go_up_and_down_and_counters_only_up() -> None:
    metrics = Metrics()
    gauge = metrics.gauge("depth", "Depth.")
    gauge.set(5)
    gauge.set(3)
    assert samples(metrics) == {("depth", ()): 3}
    with pytest.raises(ValueError, match="non-negative"):
        metrics.counter("ups", "Ups.").inc(-1)


def test_label_values_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.process.metrics.MAX_LABEL_VALUES", 3)
    metrics = Metrics()
    counter = metrics.counter("sluice:shed", "Refused.", ["tenant", "tier"])
    for number in range(100):
        counter.inc(tenant=f"t{number}", tier="free")
    counter.inc(tenant="t1", tier="free")
    found = {dict(labels)["tenant"]: value for (_, labels), value in samples(metrics).items()}
    assert found == {"t0": 1, "t1": 2, "t2": 1, OTHER: 97}
    assert len(counter._children) == 3, "only bounded values are remembered"


def test_odd_label_values_are_cut_and_escaped() -> None:
    metrics = Metrics()
    gauge = metrics.gauge("depth", "Depth.", ["name"])
    gauge.set(1, name='quo"te\nline\\é')
    gauge.set(2, name="x" * 1000)
    names = {dict(labels)["name"] for _, labels in samples(metrics)}
    assert names == {'quo"te\nline\\é', "x" * MAX_LABEL_CHARS}


def test_labels_must_be_those_declared() -> None:
    counter = Metrics().counter("ups", "Ups.", ["a"])
    with pytest.raises(AssertionError, match="declared"):
        counter.inc()
    with pytest.raises(KeyError):
        counter.inc(b="x")


def test_each_process_has_a_registry_of_its_own_and_a_name_is_declared_once() -> None:
    first, second = Metrics(), Metrics()
    first.gauge("depth", "Depth.").set(1)
    second.gauge("depth", "Depth.").set(2)
    assert samples(first) == {("depth", ()): 1}
    assert samples(second) == {("depth", ()): 2}
    with pytest.raises(ValueError, match="Duplicated"):
        first.gauge("depth", "Depth.")


def test_a_series_appears_with_its_first_zero() -> None:
    metrics = Metrics()
    counter = metrics.counter("ups", "Ups.", ["reason"])
    assert samples(metrics) == {}
    counter.inc(0, reason="stop")
    assert samples(metrics) == {("ups_total", (("reason", "stop"),)): 0}
