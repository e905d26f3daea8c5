"""Failpoints: where a test can end the process, and that nothing else ever does."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.kit.failpoints import (
    FAILPOINTS,
    FUTURE_FAILPOINTS,
    LOADER_FAILPOINTS,
    PARKING_FAILPOINTS,
    REPLACEMENT_FAILPOINTS,
    SESSION_FAILPOINTS,
    TRANSFER_FAILPOINTS,
    VARIABLE,
    Failpoints,
)

PLACES = (
    *FAILPOINTS,
    *TRANSFER_FAILPOINTS,
    *FUTURE_FAILPOINTS,
    *LOADER_FAILPOINTS,
    *PARKING_FAILPOINTS,
    *SESSION_FAILPOINTS,
    *REPLACEMENT_FAILPOINTS,
)

PROGRAM = """
from services.kit.failpoints import reach
for place in ('operation.begun', 'journal.commit.before', 'journal.commit.before', 'journal.commit.before'):
    reach(place)
    print(place, flush=True)
"""


def test_the_process_ends_at_the_time_that_was_armed():
    """It dies as by kill -9, the second time the place is reached."""
    ended = subprocess.run(
        [sys.executable, '-c', PROGRAM],
        env={VARIABLE: 'journal.commit.before=2'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == ['operation.begun', 'journal.commit.before']


def test_places_that_are_not_armed_are_passed():
    """Nothing happens, however often."""
    for name in PLACES:
        Failpoints({}).reach(name)
        Failpoints.from_environment({}).reach(name)


@pytest.mark.parametrize('value', ['nowhere=1', 'operation.begun=often', 'snapshot.taken=0'])
def test_what_cannot_be_meant_is_refused(value):
    """A test that arms nothing by mistake would prove nothing."""
    with pytest.raises(ValueError, match=r'.'):
        Failpoints.from_environment({VARIABLE: value})


def test_every_place_is_somewhere():
    """Each name that can be armed is reached by the services' code, and no other is."""
    root = Path(__file__).parents[3] / 'services'
    found = {
        name
        for path in root.rglob('*.py')
        for name in re.findall(r"\breach\('([\w.]+)'\)", path.read_text(encoding='utf-8'))
    }
    assert found == set(PLACES)
