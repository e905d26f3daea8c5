"""The page of Prometheus metrics, from the code that declares them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = 'twinkle_'
_INTRODUCTION = """# Metrics

A service with `telemetry.metrics_port` serves these metrics in Prometheus' format
([configuration](configuration.md)). A histogram also has series with the suffixes `_bucket`, `_sum` and `_count`. The
library for Prometheus adds metrics of the process, such as `process_resident_memory_bytes`.

| metric | kind | labels | meaning | declared in |
| --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class DeclaredMetric:
    """A metric, as its declaration describes it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str
    path: str
    """File of the declaration, below the top of the repository."""


def metrics_page(root: Path) -> str:
    """Return the page of all metrics that the services declare."""
    rows = [
        f'| `{metric.name}` | {metric.kind} | {", ".join(f"`{label}`" for label in metric.labels)} | {metric.meaning} '
        f'| `{metric.path}` |'
        for metric in sorted(declared_metrics(root), key=lambda metric: metric.name)
    ]
    return _INTRODUCTION + '\n'.join(rows) + '\n'


def declared_metrics(root: Path) -> Iterator[DeclaredMetric]:
    """Yield each metric: a call whose first arguments are a name with the prefix, a description and maybe labels."""
    for path in sorted((root / 'services').rglob('*.py')):
        text = path.read_text(encoding='utf-8')
        if f"'{_PREFIX}" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and len(node.args) >= 2 and _is_name(node.args[0]):
                kind = ast.unparse(node.func).rpartition('.')[2].removeprefix('Call').lower()
                name, meaning = (ast.literal_eval(argument) for argument in node.args[:2])
                labels = ast.literal_eval(node.args[2]) if len(node.args) > 2 else ()
                yield DeclaredMetric(name, kind, tuple(labels), meaning, path.relative_to(root).as_posix())


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(_PREFIX)
