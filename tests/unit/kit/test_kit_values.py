"""Ids, clocks, paging, configuration and worker threads."""

import base64
from datetime import timedelta
from pathlib import Path

import pytest

from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.config import ServiceConfig, load_config
from twinkle_services.kit.errors import InvalidField, InvalidPageToken
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.worker import SingleWorker


class ProbeConfig(ServiceConfig):
    """Configuration of a service that exists only in these tests."""

    service = 'probe'
    names: tuple[str, ...] = ()


def test_ids_are_unique_and_begin_with_their_prefix() -> None:
    """Ten thousand ids differ, and each begins with its prefix."""
    ids = {new_id('ad') for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(item.startswith('ad-') and len(item) == 25 for item in ids)


def test_fake_clock_advances_both_of_its_times() -> None:
    """The wall-clock and the monotonic time of a fake clock advance together."""
    clock = FakeClock()
    begin = clock.now()
    clock.advance(timedelta(seconds=3))
    assert clock.now() - begin == timedelta(seconds=3)
    assert clock.monotonic() == 3.0


def test_page_token_restores_the_sort_key() -> None:
    """A page token restores the sort key, and page sizes have a default and a maximum."""
    token = page_token_after(('2026', 'ad-1'), query='list/alice')
    page = parse_page(0, token, query='list/alice', key_types=(str, str))
    assert (page.after, page.size) == (('2026', 'ad-1'), 50)
    assert parse_page(5000, '', query='list/alice', key_types=(str, str)).size == 1000


INVALID_TOKENS = [
    'x',
    '!!',
    'bnVsbA==',
    page_token_after(('2026', 'ad-1'), query='list/bob'),
    page_token_after(('2026', 1), query='list/alice'),
    page_token_after(('2026',), query='list/alice'),
    page_token_after(('2026', '\ud800'), query='list/alice'),
    base64.urlsafe_b64encode(b'[' * 100_000).decode(),
]


@pytest.mark.parametrize('token', INVALID_TOKENS)
def test_invalid_page_token_is_refused(token: str) -> None:
    """Malformed tokens and tokens of other queries are refused."""
    with pytest.raises(InvalidPageToken):
        parse_page(10, token, query='list/alice', key_types=(str, str))


def test_negative_page_size_is_refused() -> None:
    """The refusal of a negative page size names the field."""
    with pytest.raises(InvalidField, match='page_size'):
        parse_page(-1, '', query='q', key_types=(str,))


def test_config_sources_override_each_other_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line overrides the environment, which overrides the file."""
    file = tmp_path / 'probe.yaml'
    file.write_text('listen: 127.0.0.1:1\ndrain_seconds: 1\nlimits: {queue_length: 5}\n')
    monkeypatch.setenv('TWINKLE_PROBE_DRAIN_SECONDS', '2')
    monkeypatch.setenv('TWINKLE_PROBE_LIMITS__MESSAGE_BYTES', '4096')
    config = load_config(ProbeConfig, ['--config', str(file), '--set', 'listen=127.0.0.1:3'])
    assert (config.listen, config.drain_seconds) == ('127.0.0.1:3', 2)
    assert (config.limits.queue_length, config.limits.message_bytes) == (5, 4096)


def test_config_ignores_the_variable_of_model_aliases(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of the hub's model aliases is not read as a field of the model service."""

    class ModelProbeConfig(ServiceConfig):
        service = 'model'

    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'small=org/name')
    monkeypatch.setenv('TWINKLE_MODEL_DRAIN_SECONDS', '2')
    assert load_config(ModelProbeConfig, []).drain_seconds == 2


@pytest.mark.parametrize(
    ('argument', 'named'),
    [
        ('lisden=x', ': lisden: '),
        ('limits.queue_length=-1', ': limits.queue_length: '),
        ('limits=3', ': limits: '),
        ('limits', ": --set requires FIELD=VALUE, got 'limits'"),
        ('=3', ': --set requires FIELD=VALUE'),
        ('listen.port=3', ': listen.port: listen is not a section'),
        ('tls.certificate=/nowhere/cert.pem', ': tls'),
        ('names=one', ': names: must be a list, such as [a, b]'),
    ],
)
def test_invalid_config_names_the_field(argument: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid setting prevents the start with a message that names the setting."""
    with pytest.raises(SystemExit) as caught:
        load_config(ProbeConfig, ['--set', 'listen=127.0.0.1:3', '--set', argument])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert named in message
    assert 'Value error' not in message
    assert ': :' not in message


def test_empty_text_of_a_setting_is_an_empty_string(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting without a value is the empty string, on the command line and in the environment."""
    assert load_config(ProbeConfig, ['--set', 'internal_token=']).internal_token == ''
    monkeypatch.setenv('TWINKLE_PROBE_INTERNAL_TOKEN', '')
    assert load_config(ProbeConfig, []).internal_token == ''


def test_config_does_not_show_its_secret() -> None:
    """The representation of a configuration does not contain the internal token."""
    assert 's3cr3t' not in repr(ProbeConfig(internal_token='s3cr3t'))


async def test_worker_keeps_order_and_raises_in_the_caller() -> None:
    """Calls run in order, and an exception is raised where the call is awaited."""
    worker = SingleWorker('test')
    results: list[int] = []
    try:
        for number in range(5):
            await worker.run(results.append, number)
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 // 0)
    finally:
        worker.close()
    assert results == [0, 1, 2, 3, 4]
