"""Weight transfers complete after kills and cuts: a few seeds of `./run faults --transfers`."""

from pathlib import Path

import pytest

from e2e.faults.transfers import SEEDS_PER_CYCLE, TransferHarness
from services.kit.failpoints import TRANSFER_FAILPOINTS


@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_no_fault_mixes_or_loses_weights(tmp_path: Path) -> None:
    """Processes are killed at random bytes and at every failpoint; every received version equals the published one."""
    report = await TransferHarness(tmp_path).run(range(SEEDS_PER_CYCLE))
    assert report.violations == {}
    assert set(TRANSFER_FAILPOINTS) | {'subscribe cut', 'publish cut', 'trainer', 'sampler'} <= set(report.deaths)
    assert report.resent_bytes < report.cut_at_bytes + (3 << 20)
