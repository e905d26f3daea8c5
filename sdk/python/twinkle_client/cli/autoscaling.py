"""Changes of the number of samplers of a running stack, as its load requires."""

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from twinkle.api.gateway.v1 import fleet_service_pb2 as pb
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import Error
from twinkle_client.fleet import FleetAdministration
from twinkle_client.stack.hosts import StackError
from twinkle_client.stack.samplers import add_sampler, drain_replica, forget_left
from twinkle_client.stack.scaling_rule import Scaling, ScalingRule
from twinkle_client.stack.spawning import Report, service_of
from twinkle_client.stack.state import ServiceState, StackState
from twinkle_client.stack.state_folder import StackBusyError

_POLL_SECONDS = 1.0
_END_SECONDS = 60.0
_RETRY_SECONDS = 60.0
"""Pause after the failed start of a sampler, for example when the cluster has no free machine."""


class Autoscaler:
    """Changes the number of samplers of a running stack, one at a time.

    Concurrency: the changes are made in a background thread, from `start` to `stop`.
    """

    def __init__(self, state: StackState, scaling: Scaling, *, report: Report, say: Callable[[str], object]) -> None:
        """Describe the task.

        Args:
            state: The running stack.
            scaling: When the number changes.
            report: Callback for the events of samplers.
            say: Callback for the reasons of changes, and for failures.
        """
        self._folder = state.state_dir
        self._url, self._key, self._ca = state.url, state.read_api_key(), state.ca
        self._scaling = scaling
        self._report = report
        self._say = say
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='autoscaler', daemon=True)
        self._rules = {name: ScalingRule(scaling) for name in state.base_models}
        samplers = [item for item in state.services if service_of(item.name) == 'sampler']
        self._min_counts = {name: _count(samplers, name) for name in state.base_models}

    def start(self) -> None:
        """Start to change the number of samplers, until `stop` is called or the stack is stopped."""
        self._thread.start()

    def stop(self) -> None:
        """Begin no more changes."""
        self._stopped.set()

    def wait(self) -> None:
        """Wait for the change in progress after `stop`, which ends soon if the stack was stopped."""
        self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        client = TwinkleClient(self._url, self._key, ca=self._ca, retry_timeout=timedelta(0))
        fleet = FleetAdministration(client=client)
        try:
            while not self._stopped.wait(_POLL_SECONDS) and (state := StackState.load(self._folder)) is not None:
                self._follow(state, fleet)
        finally:
            client.close()

    def _reset(self) -> None:
        for rule in self._rules.values():
            rule.reset()

    def _follow(self, state: StackState, fleet: FleetAdministration) -> None:
        try:
            forget_left(self._folder)
            self._change(state, fleet)
        except (Error, StackBusyError):
            # The gateway or the stack is restarting, so the loads are unknown.
            self._reset()
        except (StackError, OSError) as error:
            self._reset()
            if not self._stopped.is_set():
                self._say(f'{error}\nThe next attempt is in {_RETRY_SECONDS:.0f} s at the earliest.')
            self._stopped.wait(_RETRY_SECONDS)

    def _change(self, state: StackState, fleet: FleetAdministration) -> None:
        replicas = [item for item in fleet.list_replicas() if _is_counted(item)]
        for base_model, rule in self._rules.items():
            serving = [item for item in replicas if base_model in item.base_models]
            change = rule.decide([item.load for item in serving], time.monotonic())
            if change > 0:
                self._grow(state, base_model)
            elif change < 0:
                self._shrink(state, base_model, serving, fleet)

    def _grow(self, state: StackState, base_model: str) -> None:
        if _count(state.services, base_model) >= self._scaling.max_samplers:
            return
        self._say(f'requests wait at all samplers of {base_model}; starting another one')
        add_sampler(self._folder, engine='', base_model=base_model, report=self._report)

    def _shrink(
        self, state: StackState, base_model: str, serving: Iterable[pb.Replica], fleet: FleetAdministration
    ) -> None:
        if _count(state.services, base_model) <= self._min_counts[base_model]:
            return
        by_address = {item.address: item.replica_id for item in serving}
        # The newest one first, because older ones hold more prefixes.
        for service in reversed(state.services):
            if service.address in by_address and _is_sampler_of(service, base_model):
                self._say(f'{service.name} is no longer needed; draining it')
                drain_replica(self._folder, by_address[service.address], service.address, drain=fleet.drain)
                return


def _is_counted(replica: pb.Replica) -> bool:
    """Return whether a replica is a running sampler that serves all runs and reports its load."""
    if replica.service != 'sampler' or replica.state != pb.REPLICA_STATE_READY or replica.followed_run:
        return False
    return replica.HasField('load') and not (replica.load.is_paused or replica.load.is_sleeping)


def _count(services: Iterable[ServiceState], base_model: str) -> int:
    return sum(_is_sampler_of(service, base_model) for service in services)


def _is_sampler_of(service: ServiceState, base_model: str) -> bool:
    """Return whether a service is a sampler of a base model that is not leaving."""
    return service_of(service.name) == 'sampler' and service.base_model == base_model and not service.is_leaving
