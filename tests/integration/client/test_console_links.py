"""Tests of `twinkle console` and of one-time links, with a real gateway."""

import asyncio
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from fixtures.certificates import make_authority
from fixtures.running_gateway import ADMIN_KEY, running_gateway
from twinkle_client.cli import app
from twinkle_client.cli.console import print_console_link
from twinkle_client.console_link import ConsoleUnavailable, create_console_link
from twinkle_client.endpoint import Endpoint
from twinkle_client.stack import StackState
from twinkle_client.stack.state import key_path


async def link_for(address: str, *, key: str = ADMIN_KEY, ca: str = '') -> str:
    return await asyncio.to_thread(create_console_link, Endpoint(address, key, ca))


async def log_in(url: str, **options: Any) -> int:
    """Use a link as the app does, and return the status."""
    page, _, link = url.partition('/console/#/login/')
    async with httpx.AsyncClient(**options) as client:
        return (await client.post(f'{page}/console/api/login', json={'link': link})).status_code


async def test_command_prints_a_link_that_logs_in_once(tmp_path: Path) -> None:
    """The printed link logs a browser in once, with the key from the environment."""
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0') as gateway:
        address = f'http://{gateway.http_address}'
        result = await asyncio.to_thread(
            CliRunner().invoke, app, ['console', '--http', address], env={**os.environ, 'TWINKLE_API_KEY': ADMIN_KEY}
        )
        assert result.exit_code == 0, result.output
        # The gateway runs in this process and may log between the command's lines.
        (url,) = [line for line in result.stdout.splitlines() if line.startswith(f'{address}/console/#/login/')]
        assert [await log_in(url), await log_in(url)] == [200, 401]


async def test_link_of_a_server_with_tls(tmp_path: Path) -> None:
    """A link for a server with TLS is created over a verified connection."""
    folder = make_authority(tmp_path / 'tls')
    public = {'certificate': folder / 'gateway.crt', 'key': folder / 'gateway.key'}
    async with running_gateway(
        tmp_path, http_listen='127.0.0.1:0', internal_listen='127.0.0.1:0', public_tls=public
    ) as gateway:
        address = f'https://{gateway.http_address}'
        url = await link_for(address, ca=str(folder / 'ca.crt'))
        assert url.startswith(f'{address}/console/#/login/')
        with pytest.raises(ConsoleUnavailable, match='certificate'):
            await link_for(address)
        with pytest.raises(ConsoleUnavailable, match='http_listen'):
            await link_for(f'http://{gateway.http_address}')


async def test_reason_for_a_missing_link_is_named(tmp_path: Path) -> None:
    """The error for a missing link names the cause: a wrong key, a disabled console, or a wrong address."""
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0') as gateway:
        with pytest.raises(ConsoleUnavailable, match='key is not valid'):
            await link_for(gateway.http_address, key='tml-wrong')
        with pytest.raises(ConsoleUnavailable, match='--http URL'):
            await link_for(gateway.address)
        closed = gateway.http_address
    with pytest.raises(ConsoleUnavailable, match='--http URL'):
        await link_for(closed)
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0', console=False) as gateway:
        with pytest.raises(ConsoleUnavailable, match='console: true'):
            await link_for(gateway.http_address)


@pytest.mark.parametrize('is_served', [True, False])
async def test_started_stack_prints_a_link_if_it_has_a_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_served: bool
) -> None:
    """`twinkle up` prints a link that logs in with the stack's key, and no link if the console is disabled."""
    async with running_gateway(tmp_path, http_listen='127.0.0.1:0', console=is_served) as gateway:
        key_path(tmp_path).write_text(f'{ADMIN_KEY}\n')
        state = StackState.create(tmp_path, base_model='tiny', services=(), http_address=gateway.http_address)
        capsys.readouterr()
        await asyncio.to_thread(print_console_link, state)
        found = [line for line in capsys.readouterr().out.splitlines() if line.startswith('Console: ')]
        if not is_served:
            assert found == []
            return
        (line,) = found
        assert await log_in(line.removeprefix('Console: ')) == 200


def test_stack_without_http_prints_no_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stack without HTTP has no console, and `twinkle up` makes no request."""
    print_console_link(StackState.create(tmp_path, base_model='tiny', services=()))
    assert capsys.readouterr().out == ''
