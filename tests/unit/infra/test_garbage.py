"""Objects that are created during a pause of the garbage collection are excluded from later collections."""

import gc
from collections.abc import Iterator

import pytest

from twinkle.infra.garbage import collections_paused


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Include the objects of other tests in collections again, so that unclosed resources are still reported."""
    yield
    gc.unfreeze()


def test_collections_are_paused_and_leave_out_the_objects_of_the_block() -> None:
    """The collector is off in the block; it is on afterwards, and does not track an object of the block."""
    with collections_paused():
        assert not gc.isenabled()
        created = [object()]
        assert _is_tracked_by_collections(created)
    assert gc.isenabled()
    assert not _is_tracked_by_collections(created)


def test_a_disabled_collector_stays_disabled() -> None:
    """The end of a pause leaves the collector off if it was off before, such as in a block within another one."""
    with collections_paused():
        with collections_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    """The collector is on again after an exception in the block."""
    with pytest.raises(ImportError), collections_paused():
        raise ImportError
    assert gc.isenabled()


def _is_tracked_by_collections(item: object) -> bool:
    return any(found is item for found in gc.get_objects())
