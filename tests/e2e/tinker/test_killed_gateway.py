"""kill -9 of the gateway under a program of the Tinker SDK: the program ends with the weights of one undisturbed.

`./run faults N --gateway` does the same for as many seeds as one likes.
"""

import pytest

from e2e.faults.gateway import GatewayKills
from fixtures.tinker_sdk import SDK_MARKS
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.timeout(600), *SDK_MARKS]


def test_program_outlives_the_gateway_s_death(stack: StackState) -> None:
    """Killed once or twice at random moments, the gateway resolves what was pending, to the same bits."""
    kills = GatewayKills(stack)
    report = kills.run(range(2))
    assert report.violations == {}, report
