"""Metrics of one process in Prometheus's text format, in a registry of its own: no globals, so a test can make many.

A label takes a bounded number of distinct values; from then on new ones are counted under `other`, so that a client
that invents names cannot fill the memory. Names may have a colon (`sluice:qoe`, `vllm:num_requests_running`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import prometheus_client
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""What `Metrics.render` returns, understood by every scraper."""
OTHER: Final = "other"
"""Label value that stands for those beyond the limit."""
MAX_LABEL_VALUES: Final = 64
"""Most distinct values per label of a metric, without `other`."""
MAX_LABEL_CHARS: Final = 128
"""Longest label value; a longer one is cut."""
LATENCY_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
"""Default borders of histograms, seconds."""


class _Labelled:
    """A metric of the library, and the label values that it has seen."""

    def __init__(self, raw: MetricWrapperBase, labels: Sequence[str]) -> None:
        self._raw = raw
        self._labels = tuple(labels)
        self._seen: dict[str, set[str]] = {label: set() for label in labels}
        self._children: dict[tuple[str, ...], Any] = {}

    def _child(self, values: dict[str, str]) -> Any:
        assert len(values) == len(self._labels), f"labels {sorted(values)} given, {sorted(self._labels)} declared"
        if not self._labels:
            return self._raw
        given = tuple([values[label] for label in self._labels])
        child = self._children.get(given)
        if child is None:
            bounded = tuple(self._bounded(label, value) for label, value in zip(self._labels, given, strict=True))
            child = self._raw.labels(*bounded)
            if bounded == given:  # only these are bounded in number
                self._children[given] = child
        return child

    def _bounded(self, label: str, value: str) -> str:
        value = value[:MAX_LABEL_CHARS]
        seen = self._seen[label]
        if value not in seen:
            if len(seen) >= MAX_LABEL_VALUES:
                return OTHER
            seen.add(value)
        return value


class Counter(_Labelled):
    """A number that only grows; its name in the text ends with `_total`."""

    def inc(self, amount: float = 1, **labels: str) -> None:
        """Add to it; 0 makes the series appear."""
        self._child(labels).inc(amount)


class Gauge(_Labelled):
    """A number that goes up and down."""

    def set(self, value: float, **labels: str) -> None:
        """Replace the value."""
        self._child(labels).set(value)

    def clear(self) -> None:
        """Forget every labelled series; those that are set again reappear."""
        self._raw.clear()
        self._children.clear()
        for seen in self._seen.values():
            seen.clear()


class Histogram(_Labelled):
    """Counts of observations per bucket, their number and their sum."""

    def observe(self, value: float, **labels: str) -> None:
        """Count one observation."""
        self._child(labels).observe(value)


class Metrics:
    """Every metric of one process. A name may be declared once."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """Declare a counter.

        Args:
            name: with or without `_total`.
            help_text: one sentence, with the unit.
            labels: names of its labels.
        """
        raw = prometheus_client.Counter(name, help_text, labels, registry=self._registry)
        return Counter(raw, labels)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
        """Declare a gauge; arguments as for `counter`."""
        raw = prometheus_client.Gauge(name, help_text, labels, registry=self._registry)
        return Gauge(raw, labels)

    def histogram(
        self, name: str, help_text: str, labels: Sequence[str] = (), *, buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """Declare a histogram; arguments as for `counter`.

        Args:
            name: with its unit at the end, for example `_seconds`.
            help_text: one sentence, with the unit.
            labels: names of its labels.
            buckets: upper borders, ascending; infinity is added.
        """
        raw = prometheus_client.Histogram(name, help_text, labels, registry=self._registry, buckets=tuple(buckets))
        return Histogram(raw, labels)

    def add_process(self) -> None:
        """Have this process's own figures in it, under the names of Prometheus's clients (`process_…`), unlabelled."""
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """Return what `/metrics` answers: the text, and its content type."""
        return generate_latest(_WithoutCreationTimes(self._registry)), CONTENT_TYPE


class _WithoutCreationTimes(CollectorRegistry):
    """A registry as it is rendered: the library's `_created` series, which nobody reads, are left out."""

    def __init__(self, inner: CollectorRegistry) -> None:
        super().__init__()
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        for metric in self._inner.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
