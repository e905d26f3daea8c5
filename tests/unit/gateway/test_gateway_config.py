"""Validation and derived values of the gateway's configuration."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from twinkle_services.gateway.config import GatewayConfig, QuotasConfig
from twinkle_services.gateway.quotas.quotas import default_quota
from twinkle_services.gateway.quotas.rules import MAX_WEIGHT, MIN_WEIGHT


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('bootstrap_key', 'without-the-prefix-but-long'),
        ('bootstrap_key', 'tml-short'),
        ('key_pepper', 'ab' * 15),
        ('key_pepper', 'no hexadecimal digits at all, really'),
        ('database_url', 'mysql://host/name'),
        ('session_lifetime', timedelta(seconds=30)),
        ('heartbeat_interval', timedelta()),
        ('upstreams', {'models': 'host:1'}),
        ('upstreams', {'models': ['host:1', '']}),
        ('upstreams', {'model': 'host:1', 'models': ['host:1']}),
        ('upstreams', {'model_services': ['host:1']}),
    ],
)
def test_invalid_value_is_refused(field: str, value: Any) -> None:
    """An invalid value of a setting raises a validation error."""
    with pytest.raises(ValidationError):
        GatewayConfig.model_validate({field: value})


def test_secrets_are_not_in_the_printed_configuration() -> None:
    """The `repr` of a configuration contains no secret."""
    config = GatewayConfig(
        bootstrap_key='tml-' + 's' * 20,
        key_pepper='ab' * 16,
        database_url='postgresql://user:password@host/name',
        internal_token='token-of-services',
    )
    for secret in ('s' * 20, 'abab', 'password', 'token-of-services'):
        assert secret not in repr(config)


def test_default_database_is_in_the_state_folder(tmp_path: Path) -> None:
    """The default database is an SQLite file in the state folder, next to the pepper."""
    config = GatewayConfig(state_dir=tmp_path)
    assert config.database_address() == f'sqlite:///{tmp_path}/gateway.db'
    assert config.pepper_file() == tmp_path / 'key_pepper'


def test_model_services_have_unique_names() -> None:
    """The first model service is named `model`, and further ones are numbered from 2."""
    one = GatewayConfig.model_validate({'upstreams': {'model': 'host:1'}})
    assert one.upstreams.addresses() == {'model': 'host:1'}
    three = GatewayConfig.model_validate({'upstreams': {'model': 'host:1', 'models': ['host:2', 'host:3']}})
    assert three.upstreams.model_addresses() == {'model': 'host:1', 'model-2': 'host:2', 'model-3': 'host:3'}
    several = GatewayConfig.model_validate({'upstreams': {'models': ['host:2'], 'data': 'host:4'}})
    assert several.upstreams.addresses() == {'model': 'host:2', 'data': 'host:4'}


@pytest.mark.parametrize('weight', [MIN_WEIGHT, MAX_WEIGHT])
def test_default_weight_has_the_bounds_of_a_quota(weight: float) -> None:
    """The default weight accepts the smallest and the largest weight of a quota, and no weight outside them."""
    assert default_quota(QuotasConfig(weight=weight)).weight == weight
    with pytest.raises(ValidationError):
        QuotasConfig(weight=weight * 1.01 if weight == MAX_WEIGHT else weight * 0.99)
