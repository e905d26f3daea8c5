"""Fixtures that run a gateway, and services behind it, in this process over loopback."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.gateway_upstream import Upstream
from fixtures.running_gateway import RunningGateway, running_gateway


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    """All services behind the gateway."""
    async with Upstream().serving() as serving:
        yield serving


@pytest.fixture
async def gateway(upstream: Upstream, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway in front of `upstream`."""
    async with running_gateway(tmp_path, upstream=upstream.address) as running:
        yield running
