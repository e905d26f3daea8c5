"""Starting, repairing and stopping a stack."""

import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from twinkle_client.stack.hosts import StackError, open_host
from twinkle_client.stack.options import StackOptions
from twinkle_client.stack.spawning import (
    STOP_GRACE_SECONDS,
    Report,
    Spawner,
    end_service,
    read_address,
    service_of,
)
from twinkle_client.stack.startup import Launch, wait_for_fleet
from twinkle_client.stack.state import StackState
from twinkle_client.stack.state_folder import check_free_space, folder_problem, locked, make_private

_REVIVAL_SECONDS = 30.0
"""Longest time for which a restart waits for a cluster's resources. A longer wait would delay other programs."""
_STOP_WAIT_SECONDS = 60.0
"""Longest time for which `stop_stack` waits for a restart in progress."""
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_stack(options: StackOptions, *, report: Report) -> StackState:
    """Start a stack and return it.

    A stack that is already running in this state folder is returned unchanged. The remaining processes of a broken
    stack are stopped first. If a start fails, all started services are stopped.

    Raises:
        StackError: A service did not start, or the state folder cannot be written; the message contains the cause.
    """
    try:
        return _start(options, report=report)
    except OSError as error:
        raise StackError(folder_problem(options.state_dir, error)) from error


def _start(options: StackOptions, *, report: Report) -> StackState:
    make_private(options.state_dir)
    with locked(options.state_dir):
        state = StackState.load(options.state_dir)
        if state is not None and state.is_running():
            return state
        if state is not None:
            _stop(state, report=report)
        check_free_space(options)
        launch = Launch(options, report)
        try:
            return launch.run()
        except BaseException:
            _stop(launch.current_state(), report=report)
            raise


def revive_stack(state_dir: Path, *, report: Report, waiting: Collection[str] = ()) -> StackState | None:
    """Restart the exited services of a running stack with the same configurations and addresses.

    On a cluster, a model service may start on another machine; the gateway is then restarted with the new address.

    Args:
        state_dir: State folder of the stack.
        report: Called with a service and an event.
        waiting: Names of services whose restart is not due yet.

    Returns:
        The stack, or None if it was stopped.

    Raises:
        StackBusyError: The stack is being started or stopped.
        StackError: A service did not start; the message contains the end of its log.
    """
    with locked(state_dir):
        state = StackState.load(state_dir)
        if state is None or state.is_running() or not state.address:
            return state
        spawner = Spawner(state_dir, report, host=open_host(state.placement, state_dir, wait_seconds=_REVIVAL_SECONDS))
        ended = state.ended()
        gone = [item for item in state.services if not item.is_running() and item not in ended]
        for service in gone:
            service.process.end(grace_seconds=0.0)
        state = state.without(gone)
        for service in ended:
            if service.name in waiting:
                continue
            report(service.name, 'ended')
            service.process.end(grace_seconds=0.0)
            spawner.spawn(service.name, listen=service.address)
            spawner.addresses[service.name] = service.address
            state = state.with_service(spawner.state_of(service.name))
            state.save()
        for name in spawner.started:
            spawner.wait_for(name)
            state = state.with_service(spawner.state_of(name))
            state.save()
        if state.placement is not None:
            state = _follow_moved_trainers(_with_current_addresses(state, spawner), spawner)
        wait_for_fleet(state, spawner, waiting)
        return state


def _with_current_addresses(state: StackState, spawner: Spawner) -> StackState:
    """Return the stack with the addresses that its processes report.

    After an interrupted start, the record may contain old addresses.
    """
    for service in state.services:
        address = read_address(spawner.address_file(service.name))
        if address and address != service.address and service.is_running():
            state = state.with_service(replace(service, address=address))
    state.save()
    return state


def _follow_moved_trainers(state: StackState, spawner: Spawner) -> StackState:
    """Restart the gateway if model services have new addresses, because a cluster moved them; return the stack."""
    trainers = [item.address for item in state.services if service_of(item.name) == 'model']
    settings = spawner.settings_of('gateway')
    if settings['upstreams']['models'] == trainers:
        return state
    settings['upstreams']['models'] = trainers
    spawner.configure('gateway', settings)
    (gateway,) = (item for item in state.services if item.name == 'gateway')
    gateway.process.end(grace_seconds=STOP_GRACE_SECONDS)
    spawner.spawn('gateway', listen=gateway.address)
    spawner.addresses['gateway'] = gateway.address
    state = state.with_service(spawner.state_of('gateway'))
    state.save()
    spawner.wait_for('gateway')
    return state


def stop_stack(state_dir: Path, *, report: Report) -> bool:
    """Stop the services of a stack in reverse start order; return whether there was a stack.

    In the main thread, SIGINT, SIGTERM and SIGHUP take effect after the last service has stopped.

    Raises:
        StackBusyError: Another program is starting or stopping services.
        StackError: The cluster of the stack cannot be reached.
    """
    if not state_dir.is_dir():
        return False
    with locked(state_dir, seconds=_STOP_WAIT_SECONDS):
        state = StackState.load(state_dir)
        if state is None:
            return False
        _stop(state, report=report)
        return True


def _stop(state: StackState, *, report: Report) -> None:
    """Stop the services in reverse start order and delete the record."""
    with _interrupts_delayed():
        for service in reversed(state.services):
            end_service(service, report)
        # If this fails, the record stays, and stopping can be repeated.
        open_host(state.placement, state.state_dir).end_unrecorded()
        state.delete()


@contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Defer signals that interrupt the program until the end of the block, if this is the main thread.

    Otherwise a second Ctrl-C would end a program that stops its services, and leave the remaining services running.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def delay(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)

    # `getsignal` returns None for a handler that was not installed from Python, which cannot be restored.
    handlers = {number: handler for number in _INTERRUPTS if (handler := signal.getsignal(number)) is not None}
    for number in handlers:
        signal.signal(number, delay)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])
