"""Restarts of the services of a running stack, and the report of their events."""

import time
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from twinkle_client.cli.session import console
from twinkle_client.stack import ServiceState, StackBusyError, StackError, StackState, remove_ended, revive_stack

_WATCH_SECONDS = 0.5
_SHORTEST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0


class StartReport:
    """Prints the events of services, and how long each start took."""

    def __init__(self) -> None:
        self._begin: dict[str, float] = {}

    def __call__(self, service: str, event: str) -> None:
        if event == 'starting':
            self._begin[service] = time.monotonic()
        elif event == 'ready':
            console.print(f'  {service:<11} ready after {time.monotonic() - self._begin[service]:.1f} s')
        elif event == 'ended':
            console.print(f'  {service:<11} restarting')
        elif event == 'stopped':
            console.print(f'  {service:<11} stopped')


class Restarts:
    """Schedule of the restarts of exited services, with longer pauses if a service could not start.

    Each service is restarted for as long as the stack runs. A service that keeps exiting must not stop the others. The
    pauses after successful starts are short: a service that crashes whenever it runs certain work skips that work after
    a few starts, and clients wait until then.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        """Time of the last restart by service."""
        self._failures: Counter[str] = Counter()
        """Number of consecutive restarts after which the service did not become ready, by service."""

    def seconds_until_due(self, service: str, now: float) -> float:
        """Return the seconds until the restart of an exited service is due; 0 if it is due now."""
        if service not in self._last:
            return 0.0
        pause = min(_SHORTEST_PAUSE_SECONDS * 2 ** min(self._failures[service], 10), _LONGEST_PAUSE_SECONDS)
        return max(self._last[service] + pause - now, 0.0)

    def record(self, service: str, now: float, *, is_ready: bool) -> None:
        """Record a restart that ended now, and whether the service became ready."""
        self._failures[service] = 0 if is_ready else self._failures[service] + 1
        self._last[service] = now


def keep_running(folder: Path) -> None:
    """Restart services that exit, until an interrupt or `twinkle down`."""
    console.print('\nPress Ctrl-C to stop.')
    restarts, reported = Restarts(), set[tuple[str, int]]()
    while (state := StackState.load(folder)) is not None:
        with suppress(StackBusyError):
            remove_ended(folder)
        pauses = {item.name: restarts.seconds_until_due(item.name, time.monotonic()) for item in state.ended()}
        for service in state.ended():
            if (service.name, service.pid) not in reported:
                _report_exit(service, pauses.get(service.name, 0.0))
            reported.add((service.name, service.pid))
        due = [name for name, seconds in pauses.items() if not seconds]
        if due:
            _restart_exited(folder, waiting=pauses.keys() - due)
            state = StackState.load(folder) or state
            failed = {item.name for item in state.ended()}
            for name in due:
                restarts.record(name, time.monotonic(), is_ready=name not in failed)
        time.sleep(_WATCH_SECONDS)
    console.print('Stopped')


def _report_exit(service: ServiceState, seconds: float) -> None:
    lines = Path(service.log_path).read_text(encoding='utf-8', errors='replace').splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), 'its log is empty')
    when = f'in {seconds:.0f} s' if seconds else 'now'
    text = f'  {service.name:<11} exited unexpectedly; restarting it {when}. End of {service.log_path}: {last}'
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _restart_exited(folder: Path, waiting: Collection[str]) -> None:
    try:
        revive_stack(folder, report=StartReport(), waiting=waiting)
    except StackBusyError:
        return
    except StackError as error:
        print_plain(str(error))


def print_plain(text: str) -> None:
    """Print text that may contain markup, such as the end of a log."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
