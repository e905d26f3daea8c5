"""Weights arrive whatever dies on their way: a few seeds of `./run faults --transfers`."""

from pathlib import Path

import pytest

from e2e.faults.transfers import SEEDS_PER_CYCLE, Stand
from services.kit.failpoints import TRANSFER_FAILPOINTS


@pytest.mark.timeout(420)
async def test_no_kill_on_the_way_mixes_or_loses_weights(tmp_path: Path) -> None:
    """Each process is killed at some byte and at every failpoint; every version that arrives is the published one."""
    report = await Stand(tmp_path).run(range(SEEDS_PER_CYCLE))
    assert report.violations == {}
    assert set(TRANSFER_FAILPOINTS) | {'subscribe cut', 'publish cut', 'trainer', 'sampler'} <= set(report.deaths)
    assert report.sent_again_bytes < report.cut_at_bytes + (3 << 20)
