"""kill -9 of the gateway under a program of the Tinker SDK, which ends with the weights of an undisturbed one.

`./run faults N --gateway` does the same for N seeds.
"""

import pytest

from e2e.faults.gateway import GatewayKills
from fixtures.tinker_sdk import SDK_MARKS
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.timeout(600), *SDK_MARKS]


def test_program_survives_a_killed_gateway(stack: StackState) -> None:
    """A gateway that is killed at random moments resolves all pending futures, with bitwise equal weights."""
    kills = GatewayKills(stack)
    report = kills.run(range(2))
    assert report.violations == {}, report
