"""Tests of sources of weights that cannot be reached."""

from pathlib import Path

import pytest

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.tls import TlsConfig
from twinkle_services.sampler.backends.weight_sources import WeightSources


async def test_relay_without_a_channel_raises_the_cause(tmp_path: Path) -> None:
    """The error that prevents a channel from opening is raised at every attempt."""
    sources = WeightSources(tls=TlsConfig(ca=tmp_path / 'nowhere.crt'))
    sources.use_relay('127.0.0.1:1')
    for _ in range(2):
        with pytest.raises(ValueError, match=r'tls\.ca: cannot read'):
            await anext(sources.follow(Caller(tenant_id='alice'), 'ad-1', None))
    await sources.close()
