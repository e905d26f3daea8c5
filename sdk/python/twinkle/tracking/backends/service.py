"""The services' store of metrics as a backend."""

from collections.abc import Mapping
from typing import Any, Protocol

from twinkle.tracking.delivery import Status
from twinkle.tracking.run import TrackedRun


class MetricStore(Protocol):
    """Store of the metrics of one run, such as `twinkle_client.metrics.RunMetrics`."""

    @property
    def run_id(self) -> str:
        """Id of the run in the services."""
        ...

    @property
    def log(self) -> Any:
        """Function that stores values: `log(values, step=step)`."""
        ...


class ServiceBackend:
    """Stores numbers with the run in the services; `twinkle run show` draws them. A repeated step replaces its values.

    Only numbers are sent. The services know the status of the run, and its name and tags are labels of the adapter.

    Args:
        metrics: Store of the run's metrics.
    """

    name = 'service'

    def __init__(self, metrics: MetricStore) -> None:
        self._metrics = metrics

    def start(self, run: TrackedRun) -> None:
        del run

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._metrics.log(values, step=step)

    def finish(self, status: Status) -> None:
        del status
