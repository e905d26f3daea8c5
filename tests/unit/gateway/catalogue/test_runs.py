"""Operations on runs, over the store in memory."""

import pytest

from fixtures.gateway_stores import MemoryRunStore
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.errors import RunNotFound
from twinkle_services.kit.caller import Caller


async def test_unknown_run_is_not_found() -> None:
    """Reading an unknown run raises RunNotFound."""
    with pytest.raises(RunNotFound):
        await Runs(MemoryRunStore()).get(Caller(tenant_id='bob'), 'ad-1')
