"""Kills the gateway during a Tinker SDK program. The results must equal those of a run without kills.

`./run faults N --gateway` does the same for N seeds.
"""

import pytest

from e2e.faults.gateway import GatewayKills
from fixtures.tinker_sdk import SDK_MARKS
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *SDK_MARKS]


def test_program_survives_a_killed_gateway(stack: StackState) -> None:
    """If the gateway is killed or has a full disk at random times, a program gives bitwise the same results."""
    kills = GatewayKills(stack)
    report = kills.run(range(2))
    assert report.violations == {}, report
