"""Failpoints kill the process at a named point, and only if a test has armed them."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_services.kit.failpoints import (
    ATTEMPT_FAILPOINTS,
    EXPIRY_FAILPOINTS,
    FAILPOINTS,
    FUTURE_FAILPOINTS,
    LOADER_FAILPOINTS,
    PARKING_FAILPOINTS,
    REPLACEMENT_FAILPOINTS,
    SESSION_FAILPOINTS,
    SIGNAL_VARIABLE,
    TAKEOVER_FAILPOINTS,
    TRANSFER_FAILPOINTS,
    VARIABLE,
    Failpoints,
)

ALL_FAILPOINTS = (
    *FAILPOINTS,
    *TRANSFER_FAILPOINTS,
    *FUTURE_FAILPOINTS,
    *LOADER_FAILPOINTS,
    *ATTEMPT_FAILPOINTS,
    *PARKING_FAILPOINTS,
    *EXPIRY_FAILPOINTS,
    *TAKEOVER_FAILPOINTS,
    *SESSION_FAILPOINTS,
    *REPLACEMENT_FAILPOINTS,
)

PROGRAM = """
from twinkle_services.kit.failpoints import reach
for name in ('operation.begun', 'journal.commit.before', 'journal.commit.before', 'journal.commit.before'):
    reach(name)
    print(name, flush=True)
"""


@pytest.mark.parametrize('death', [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
def test_process_is_killed_at_the_armed_count(death: signal.Signals):
    """The process ends by the given signal when a failpoint has been reached the configured number of times."""
    finished = subprocess.run(
        [sys.executable, '-c', PROGRAM],
        env={VARIABLE: 'journal.commit.before=2', SIGNAL_VARIABLE: death.name},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == -death
    assert finished.stdout.split() == ['operation.begun', 'journal.commit.before']


def test_failpoints_that_are_not_armed_have_no_effect():
    """Reaching a failpoint that is not armed does nothing."""
    for name in ALL_FAILPOINTS:
        Failpoints({}).reach(name)
        Failpoints.from_environment({}).reach(name)


@pytest.mark.parametrize('value', ['unknown=1', 'operation.begun=often', 'snapshot.taken=0'])
def test_invalid_settings_are_refused(value):
    """Unknown names and invalid counts are errors, so that no test runs without its failpoint."""
    with pytest.raises(ValueError, match=r'.'):
        Failpoints.from_environment({VARIABLE: value})


def test_every_failpoint_is_in_the_code():
    """The code of the services reaches exactly the listed failpoints."""
    root = Path(__file__).parents[3] / 'services'
    found = {
        name
        for path in root.rglob('*.py')
        for name in re.findall(r"\breach\('([\w.]+)'\)", path.read_text(encoding='utf-8'))
    }
    assert found == set(ALL_FAILPOINTS)
