"""Kinds of metrics: counters, histograms and gauges, recorded through OpenTelemetry.

`twinkle_services.kit.telemetry.measures` defines the metrics. Recording is cheap, and does nothing before
`start_telemetry`. Label values must come from the code, never from callers: a label with a list of values replaces all
other values with `_OTHER`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from opentelemetry import metrics

OTHER = '_OTHER'
"""Value that replaces label values outside the label's list."""
UNITS = {'s': 'seconds', 'By': 'bytes'}
"""Suffixes of the names in Prometheus, by unit. Other units have none."""
SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bounds of histograms of times."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)
"""Bounds of histograms of numbers."""
_READS = 5
"""Maximum number of attempts to read a source."""
_meter = metrics.get_meter('twinkle')


@dataclass(frozen=True)
class Label:
    """A label of a metric."""

    name: str
    values: Sequence[str] = ()
    """All values except `_OTHER`; empty if the code that records the metric limits the values."""

    def checked(self, value: str) -> str:
        """Return the value to record."""
        return value if not self.values or value in self.values else OTHER


@dataclass(frozen=True)
class _Metric:
    """Name and meaning of a metric."""

    name: str
    """Name in OpenTelemetry."""
    unit: str
    """Unit in UCUM: 's', 'By', '1', or the counted item, such as '{token}'."""
    description: str
    labels: tuple[Label, ...] = ()

    @property
    def prometheus_name(self) -> str:
        """Name in Prometheus, without the suffixes of histograms."""
        name, suffix = self.name.replace('.', '_'), UNITS.get(self.unit, '')
        return name if not suffix or name.endswith(f'_{suffix}') else f'{name}_{suffix}'

    def attributes(self, values: Sequence[str]) -> dict[str, str]:
        """Return the labels with their values, in the order of `labels`."""
        return {label.name: label.checked(value) for label, value in zip(self.labels, values, strict=True)}


@dataclass(frozen=True)
class Counter(_Metric):
    """A number that only increases."""

    def __post_init__(self) -> None:
        counter = _meter.create_counter(self.name, self.unit, self.description)
        object.__setattr__(self, '_counter', counter)

    @property
    def prometheus_name(self) -> str:
        """Name in Prometheus."""
        return f'{super().prometheus_name}_total'

    def add(self, amount: float, *values: str) -> None:
        """Add `amount` to the counter; `values` has one value for each label, in the order of `labels`."""
        counter: metrics.Counter = vars(self)['_counter']
        counter.add(amount, self.attributes(values))


@dataclass(frozen=True)
class Histogram(_Metric):
    """A distribution of observed values."""

    bounds: Sequence[float] = SECONDS
    """Upper bounds of the buckets."""

    def __post_init__(self) -> None:
        histogram = _meter.create_histogram(
            self.name, self.unit, self.description, explicit_bucket_boundaries_advisory=self.bounds
        )
        object.__setattr__(self, '_histogram', histogram)

    def record(self, value: float, *values: str) -> None:
        """Record an observation; `values` has one value for each label, in the order of `labels`."""
        histogram: metrics.Histogram = vars(self)['_histogram']
        histogram.record(value, self.attributes(values))


Source = Callable[[], float | Mapping[str, float]]
"""Returns the current value or, for a metric with a label, the current values by label value. Any thread may call
it."""


@dataclass(frozen=True)
class Gauge(_Metric):
    """A value that is read whenever the metrics are collected. It has at most one label."""

    _sources: list[Source] = field(default_factory=list[Source])
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        _meter.create_observable_gauge(self.name, [self._observe], self.unit, self.description)

    @contextmanager
    def observing(self, source: Source) -> Iterator[None]:
        """Report the values of a source during the block; values of several sources are added."""
        with self._lock:
            self._sources.append(source)
        try:
            yield
        finally:
            with self._lock:
                self._sources.remove(source)

    def _observe(self, options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        del options
        with self._lock:
            sources = list(self._sources)
        totals: dict[str, float] = {}
        if sources and self.labels:
            totals = dict.fromkeys(self.labels[0].values, 0.0)
        for source in sources:
            found = _read(source)
            for value, amount in ({'': found} if isinstance(found, int | float) else found).items():
                key = self.labels[0].checked(value) if self.labels else ''
                totals[key] = totals.get(key, 0.0) + amount
        count = len(self.labels)
        return [metrics.Observation(amount, self.attributes([key][:count])) for key, amount in totals.items()]


def _read(source: Source) -> float | Mapping[str, float]:
    """Return the value of a source. Retry if another thread changes the collection that the source reads."""
    for _ in range(_READS - 1):
        try:
            return source()
        except RuntimeError:
            # The collection changed during the iteration.
            continue
    return source()
