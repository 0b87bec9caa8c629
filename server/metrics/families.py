"""Short ways to write metric families down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.metrics_core import Metric

from server.metrics.histogram import Histogram

Labels = Mapping[str, str]


def counter(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    """One number that only grows; ``_total`` is added to the name."""
    labels = labels or {}
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counters(name: str, text: str, label_names: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    """Numbers that only grow; keys are tuples, the values of the labels."""
    family = CounterMetricFamily(name, text, labels=list(label_names))
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family


def gauge(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    """One number as it is now."""
    labels = labels or {}
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram(name: str, text: str, values: Histogram, labels: Labels | None = None) -> Metric:
    """A distribution."""
    labels = labels or {}
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), values.buckets(), values.total)
    return family


def histograms(name: str, text: str, label_names: tuple[str, ...], values: Mapping[Any, Histogram]) -> Metric:
    """Distributions; keys are tuples, the values of the labels."""
    family = HistogramMetricFamily(name, text, labels=list(label_names))
    for labels, found in values.items():
        family.add_metric(list(labels), found.buckets(), found.total)
    return family


def summary(name: str, text: str, count: int, total: float) -> Metric:
    """How many values there were, and their sum."""
    return SummaryMetricFamily(name, text, count_value=count, sum_value=total)
