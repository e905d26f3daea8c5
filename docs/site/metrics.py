"""The page of metrics, from `twinkle_services.kit.telemetry.measures`, which defines all of them."""

from twinkle_services.kit.telemetry import measures

_INTRODUCTION = """# Metrics

A service serves these metrics in Prometheus' format ([observability](../observability.md)). A histogram has series with
the suffixes `_bucket`, `_sum` and `_count`.

"""


def metrics_page() -> str:
    """Return the page of all metrics, in the order of their definition."""
    return f'{_INTRODUCTION}{measures.markdown_table()}\n'
