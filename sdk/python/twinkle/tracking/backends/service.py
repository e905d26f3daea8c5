"""The services' stores of metrics and rollouts as a backend."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from twinkle.tracking.delivery import Status
from twinkle.tracking.rollouts import TrackedRollout
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


class RolloutStore(Protocol):
    """Store of the rollouts of one run, such as `twinkle_client.rollouts.RunRollouts`."""

    @property
    def log(self) -> Any:
        """Function that stores rollouts: `log(rollouts, step=step)`."""
        ...


class ServiceBackend:
    """Stores numbers with the run in the services. The values of a repeated step replace the earlier values.

    `twinkle run show` draws the numbers. Only numbers and rollouts are sent: the services know the status of the run,
    and the name and tags of the run are labels of the adapter.

    Args:
        metrics: Store of the run's metrics.
        rollouts: Store of the run's rollouts. None: rollouts are not stored.
    """

    name = 'service'

    def __init__(self, metrics: MetricStore, rollouts: RolloutStore | None = None) -> None:
        self._metrics, self._rollouts = metrics, rollouts

    def start(self, run: TrackedRun) -> None:
        del run

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        self._metrics.log(values, step=step)

    def log_rollouts(self, rollouts: Sequence[TrackedRollout], *, step: int) -> None:
        if self._rollouts is not None:
            self._rollouts.log(rollouts, step=step)

    def finish(self, status: Status) -> None:
        del status
