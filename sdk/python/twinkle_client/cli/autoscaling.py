"""Automatic changes of the number of samplers of a running stack, according to its load."""

import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from twinkle.api.gateway.v1 import fleet_service_pb2 as pb
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import Error, RetryableError
from twinkle_client.fleet import FleetAdministration
from twinkle_client.stack.hosts import StackError
from twinkle_client.stack.samplers import add_sampler, drain_replica
from twinkle_client.stack.scaling_rule import Scaling, ScalingRule
from twinkle_client.stack.spawning import Report, service_of
from twinkle_client.stack.state import ServiceState, StackState
from twinkle_client.stack.state_folder import folder_problem

_POLL_SECONDS = 1.0
_END_SECONDS = 60.0
_RETRY_SECONDS = 60.0
"""Pause after the failed start of a sampler, for example when the cluster has no free machine."""


class Autoscaler:
    """Changes the number of samplers of a running stack, one at a time.

    Concurrency: the changes are made in a background thread, from `start` to `close`.
    """

    def __init__(self, state: StackState, scaling: Scaling, *, report: Report, say: Callable[[str], object]) -> None:
        """Initialize without starting the thread.

        Args:
            state: The running stack.
            scaling: Conditions under which the number changes.
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
        self._min_counts = {name: _count(state.services, name) for name in state.base_models}

    def start(self) -> None:
        """Start to change the number of samplers, until `close` is called or the stack is stopped."""
        self._thread.start()

    def close(self) -> None:
        """Start no further change, and wait a limited time for the change in progress."""
        self._stopped.set()
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
            is_changed = self._change(state, fleet)
        except RetryableError:
            # The gateway is restarting, so the loads are unknown.
            self._reset()
        except (Error, StackError) as error:
            self._pause(str(error))
        except OSError as error:
            self._pause(folder_problem(self._folder, error))
        else:
            if is_changed:
                # The change took time in which no loads were observed.
                self._reset()

    def _pause(self, problem: str) -> None:
        """Report a failure and wait before the next check. While the stack is being stopped, nothing is reported."""
        self._reset()
        current = StackState.load(self._folder)
        if not self._stopped.is_set() and current is not None and current.is_reachable():
            self._say(f'{problem}\nThe number of samplers is checked again in {_RETRY_SECONDS:.0f} s.')
        self._stopped.wait(_RETRY_SECONDS)

    def _change(self, state: StackState, fleet: FleetAdministration) -> bool:
        """Add or drain at most one sampler; return whether a sampler was added or drained."""
        replicas = [item for item in fleet.list_replicas() if _is_counted(item)]
        self._repeat_drains(state, replicas, fleet)
        for base_model, rule in self._rules.items():
            serving = [item for item in replicas if base_model in item.base_models]
            change = rule.decide([item.load for item in serving], time.monotonic())
            if change > 0 and self._grow(state, base_model):
                return True
            if change < 0 and self._shrink(state, base_model, serving, fleet):
                return True
        return False

    def _repeat_drains(self, state: StackState, ready: Iterable[pb.Replica], fleet: FleetAdministration) -> None:
        """Drain leaving samplers again if they are ready, because a restart of the gateway lost the drain request."""
        leaving = {service.address for service in state.services if service.is_leaving}
        for replica in ready:
            if replica.address in leaving:
                fleet.drain(replica.replica_id)

    def _grow(self, state: StackState, base_model: str) -> bool:
        # A service that has to be restarted needs the free devices before a new sampler does.
        if _count(state.services, base_model) >= self._scaling.max_samplers or state.ended():
            return False
        self._say(f'requests wait at all samplers of {base_model}; starting another sampler')
        add_sampler(self._folder, engine='', base_model=base_model, report=self._report)
        return True

    def _shrink(
        self, state: StackState, base_model: str, serving: Iterable[pb.Replica], fleet: FleetAdministration
    ) -> bool:
        """Drain the newest sampler of a base model, unless only the initial number of samplers is left.

        Returns:
            Whether a sampler was drained.
        """
        if _count(state.services, base_model) <= self._min_counts[base_model]:
            return False
        by_address = {item.address: item.replica_id for item in serving}
        # The newest sampler is drained first, because older samplers have cached more prefixes.
        for service in reversed(state.services):
            if service.address in by_address and _is_sampler_of(service, base_model):
                self._say(f'{service.name} is no longer needed; draining it')
                drain_replica(self._folder, by_address[service.address], service.address, drain=fleet.drain)
                return True
        return False


def _is_counted(replica: pb.Replica) -> bool:
    """Return whether a replica is a running sampler that serves all runs and reports its load."""
    if replica.service != 'sampler' or replica.state != pb.REPLICA_STATE_READY or replica.followed_run:
        return False
    return replica.HasField('load') and not (replica.load.is_paused or replica.load.is_sleeping)


def _count(services: Iterable[ServiceState], base_model: str) -> int:
    return sum(_is_sampler_of(service, base_model) for service in services)


def _is_sampler_of(service: ServiceState, base_model: str) -> bool:
    """Return whether a service is a sampler of a base model and is not leaving."""
    return service_of(service.name) == 'sampler' and service.base_model == base_model and not service.is_leaving
