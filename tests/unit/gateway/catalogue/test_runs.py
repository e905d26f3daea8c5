"""Operations on runs."""

import pytest

from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.errors import RunNotFound
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller


async def test_unknown_run_is_not_found(database: Database) -> None:
    """Reading an unknown run raises RunNotFound."""
    with pytest.raises(RunNotFound):
        await Runs(SqlRunStore(database)).get(Caller(tenant_id='bob'), 'ad-1')
