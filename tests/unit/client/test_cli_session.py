"""Tests of behaviour that all commands share."""

import pytest
import typer

from twinkle.api.gateway.v1.catalogue_service_pb2 import Usage
from twinkle.api.gateway.v1.metric_service_pb2 import MetricSeries
from twinkle.api.gateway.v1.quota_service_pb2 import GetTenantUsageResponse
from twinkle_client.cli.session import exit_on_interrupt, message_json


def test_interrupt_prints_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupt prints the message and exits with status 130; other exceptions pass through."""
    with pytest.raises(typer.Exit) as exit_error, exit_on_interrupt('training continues'):
        raise KeyboardInterrupt
    assert exit_error.value.exit_code == 130
    assert 'training continues' in capsys.readouterr().err
    with pytest.raises(ValueError, match='other'), exit_on_interrupt('training continues'):
        raise ValueError('other')


def test_json_of_a_message_has_numbers() -> None:
    """64-bit integers are numbers, including those in lists and nested messages; times keep the contract's format."""
    usage = Usage(run_id='ad-1', operation_count=2**40, stored_bytes=3)
    found = message_json(GetTenantUsageResponse(usages=[usage]))['usages'][0]
    assert (found['operation_count'], found['stored_bytes'], found['run_id']) == (2**40, 3, 'ad-1')
    series = MetricSeries(name='loss', steps=[1, 2**40], values=[0.5, 1.0])
    assert message_json(series)['steps'] == [1, 2**40]
