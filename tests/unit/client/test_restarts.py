"""Tests of the delays before the supervisor of `twinkle up` restarts an exited service."""

from twinkle_client.cli.restarts import Restarts


def test_first_exit_is_restarted_at_once() -> None:
    """A service that exits for the first time, or an hour after its last restart, is restarted immediately."""
    restarts = Restarts()
    assert restarts.seconds_until_due('model', 10.0) == 0.0
    restarts.record('model', 10.0, is_ready=True)
    assert restarts.seconds_until_due('model', 10.0 + 3600.0) == 0.0


def test_pauses_grow_to_a_limit_and_never_end_the_restarts() -> None:
    """A service that does not become ready is restarted again and again, after pauses that grow to 60 seconds."""
    restarts, now, pauses = Restarts(), 0.0, list[float]()
    for _ in range(50):
        pauses.append(restarts.seconds_until_due('model', now))
        now += pauses[-1]
        restarts.record('model', now, is_ready=False)
    assert pauses[:4] == [0.0, 4.0, 8.0, 16.0]
    assert pauses == sorted(pauses)
    assert max(pauses) == 60.0


def test_service_that_becomes_ready_is_restarted_soon() -> None:
    """The pause is 2 seconds if the service was ready after the last restart, even if earlier restarts failed."""
    restarts = Restarts()
    for number in range(20):
        restarts.record('model', 10.0 * number, is_ready=number >= 10)
    assert restarts.seconds_until_due('model', 190.0) == 2.0


def test_services_do_not_affect_each_other() -> None:
    """A service that does not become ready does not delay the restart of another service."""
    restarts = Restarts()
    for _ in range(20):
        restarts.record('model', 0.0, is_ready=False)
    assert restarts.seconds_until_due('model', 0.0) == 60.0
    assert restarts.seconds_until_due('gateway', 0.0) == 0.0
