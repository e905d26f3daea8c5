"""Weight transfers complete after kills and interruptions: a few seeds of `./run faults --transfers`."""

from pathlib import Path

import pytest

from e2e.faults.transfers import SEEDS_PER_CYCLE, TransferHarness
from twinkle_services.kit.failpoints import TRANSFER_FAILPOINTS


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_no_fault_mixes_or_loses_weights(tmp_path: Path) -> None:
    """Every received version equals the published one although processes are killed and connections are cut.

    Each failpoint, each cut and a kill of each peer occur at least once.
    """
    missing = set(TRANSFER_FAILPOINTS) | {'subscribe cut', 'publish cut', 'trainer', 'sampler'}
    # A transfer may complete before its fault, so a fault may only occur in a later cycle.
    for cycle in range(3):
        seeds = range(cycle * SEEDS_PER_CYCLE, (cycle + 1) * SEEDS_PER_CYCLE)
        folder = tmp_path / str(cycle)
        folder.mkdir()
        report = await TransferHarness(folder).run(seeds)
        assert report.violations == {}
        assert report.resent_bytes < report.cut_at_bytes + (3 << 20)
        missing -= set(report.deaths)
        if not missing:
            break
    assert missing == set()
