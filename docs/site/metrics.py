"""The page of metrics, from `services.kit.telemetry.measures`, which defines all of them."""

from services.kit.telemetry import measures
from services.kit.telemetry.instruments import Counter, Gauge, Histogram

Metric = Counter | Gauge | Histogram
_INTRODUCTION = """# Metrics

A service serves these metrics in Prometheus' format ([configuration](configuration.md)). A histogram has series with
the suffixes `_bucket`, `_sum` and `_count`.

| metric | kind | labels | meaning |
| --- | --- | --- | --- |
"""


def metrics_page() -> str:
    """Return the page of all metrics, sorted by name."""
    rows = [
        f'| `{metric.prometheus_name}` | {type(metric).__name__.lower()} '
        f'| {", ".join(f"`{label.name}`" for label in metric.labels)} | {metric.description} |'
        for metric in sorted(defined_metrics(), key=lambda metric: metric.prometheus_name)
    ]
    return _INTRODUCTION + '\n'.join(rows) + '\n'


def defined_metrics() -> list[Metric]:
    """Return all metrics that the services define."""
    return [value for value in vars(measures).values() if isinstance(value, Counter | Gauge | Histogram)]
