"""Notifications about changed exports."""

import asyncio

from twinkle_services.gateway.exports.exports import ExportNotifier


async def test_notification_wakes_all_waiters() -> None:
    """All waiters wake, even if `notify` is called twice before they run."""
    notifier = ExportNotifier()
    with notifier.waiter() as first, notifier.waiter() as second:
        assert not first.done()
        notifier.notify()
        notifier.notify()
        assert (await first, await second) == (None, None)


async def test_notification_before_the_wait_is_not_missed() -> None:
    """A waiter that is notified before it starts to wait completes immediately."""
    notifier = ExportNotifier()
    with notifier.waiter() as waiter:
        notifier.notify()
        done, _ = await asyncio.wait({waiter})
        assert done == {waiter}


async def test_earlier_notification_does_not_wake_a_waiter() -> None:
    """Only notifications that are sent inside a waiter's `with` block complete the waiter."""
    notifier = ExportNotifier()
    with notifier.waiter():
        notifier.notify()
    with notifier.waiter() as later:
        assert not later.done()
