"""A gateway with a damaged state folder names the file and does not start, reports a lost payload, or is unaffected."""

import asyncio
import shutil
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

import twinkle_services.gateway.__main__  # noqa: F401 (imports every feature, which registers its tables)
from fixtures.damage import apply, damages_below
from fixtures.running_gateway import ADMIN_KEY
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.errors import PayloadLost, StoredRowDamaged
from twinkle_services.gateway.futures.payloads import PayloadFiles
from twinkle_services.gateway.futures.records import FutureRecords
from twinkle_services.gateway.futures.rules import Future, FutureRequest
from twinkle_services.gateway.futures.sql import SqlFutureStore
from twinkle_services.gateway.keys.keys import open_keys
from twinkle_services.gateway.keys.pepper import PepperUnusable
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.retry import Retry
from twinkle_services.kit.sqlite_seals import DatabaseDamaged

CLOCK = FakeClock()


def _future(key: str) -> Future:
    request = FutureRequest(kind='execute', key=key, payload=key.encode(), session_id='ses-1')
    return Future.accepted(request, tenant_id='default', moment=CLOCK.now())


DONE, WAITING = _future('done'), _future('waiting')


class _Opened:
    """The stores of a gateway in one folder."""

    def __init__(self, config: GatewayConfig, database: Database) -> None:
        self.config, self.database = config, database
        self.payloads = PayloadFiles(config.payload_folder())
        self.records = FutureRecords(SqlFutureStore(database), self.payloads, retry=Retry(), clock=CLOCK)

    async def close(self) -> None:
        self.payloads.close()
        await self.database.close()

    async def fill(self) -> None:
        """Store a key, a future with its result, and an unfinished future."""
        await open_keys(self.config, self.database, clock=CLOCK)
        for future in (DONE, WAITING):
            await self.payloads.put(future.payload_name, b'request of ' + future.future_id.encode())
            await self.records.store.add_if_absent(future)
        await self.records.settle(DONE, b'result' * 50)

    async def content(self) -> list[object]:
        """Return all acknowledged content, with 'lost' for a payload that is reported as lost."""
        accounts = await open_keys(self.config, self.database, clock=CLOCK)
        key = await accounts.verifier.verify(ADMIN_KEY)
        stored = [await self.records.store.get(future.tenant_id, future.future_id) for future in (DONE, WAITING)]
        found: list[object] = [key.tenant_id, key.scopes, stored]
        for future, name in ((DONE, DONE.result_name), (WAITING, WAITING.payload_name)):
            try:
                found.append(await self.records.read(future, name))
            except PayloadLost:
                found.append('lost')
        return found


async def _open(folder: Path, *, is_loss_accepted: bool = False) -> _Opened:
    config = GatewayConfig(state_dir=folder, bootstrap_key=ADMIN_KEY)
    return _Opened(config, await Database.open(config.database_address(), is_loss_accepted=is_loss_accepted))


async def _killed(folder: Path) -> Path:
    """Return the state folder of a gateway that was killed."""
    opened = await _open(folder / 'live')
    await opened.fill()
    shutil.copytree(folder / 'live', folder / 'killed')
    await opened.close()
    return folder / 'killed'


async def _read(folder: Path) -> list[object] | str:
    """Return the content of a state folder, or the error message of the refused start."""
    try:
        opened = await _open(folder)
        try:
            return await opened.content()
        finally:
            await opened.close()
    except (DatabaseDamaged, PepperUnusable) as refusal:
        return str(refusal)


@pytest.mark.slow
async def test_damage_to_any_file_of_a_gateway_is_reported_or_has_no_effect(tmp_path: Path) -> None:
    """A gateway with any damaged file refuses to start, reports the lost payload, or returns all stored content."""
    killed, work = await _killed(tmp_path), tmp_path / 'work'
    shutil.copytree(killed, work)
    undamaged = await _read(work)
    assert isinstance(undamaged, list)
    shutil.copytree(work, tmp_path / 'stopped')
    for source in (killed, tmp_path / 'stopped'):
        for path, damage, content in damages_below(source, flips=3):
            shutil.rmtree(work)
            shutil.copytree(source, work)
            apply(work / path, content)
            found, case = await _read(work), f'{source.name}/{path}: {damage}'
            if isinstance(found, str):
                assert path.name.removesuffix('-wal').removesuffix('-shm') in found, case
                continue
            assert found[:3] == undamaged[:3], case
            assert all(part in (whole, 'lost') for part, whole in zip(found[3:], undamaged[3:], strict=True)), case


async def _with_definition(folder: Path, change: str, table: str) -> list[object]:
    """Change the definition of a table of a filled database, and return the content before the change."""
    opened = await _open(folder)
    await opened.fill()
    content = await opened.content()
    await opened.close()
    with closing(sqlite3.connect(folder / 'gateway.db')) as connection:
        connection.execute('PRAGMA writable_schema=ON')
        statement = f"UPDATE sqlite_schema SET {change} WHERE type = 'table' AND name = '{table}'"
        assert connection.execute(statement).rowcount == 1
        connection.commit()
    return content


@pytest.mark.parametrize('is_loss_accepted', [False, True])
@pytest.mark.parametrize('change', ["name = 'rvns'", "tbl_name = 'rvns'", "sql = ''", 'rootpage = rootpage + 1'])
async def test_unusable_definition_names_the_file(tmp_path: Path, change: str, *, is_loss_accepted: bool) -> None:
    """A database with an unusable definition of a table is refused by name, even if the loss of rows is accepted."""
    await _with_definition(tmp_path, change, 'runs')
    with pytest.raises(DatabaseDamaged, match=r'gateway\.db is damaged'):
        await _open(tmp_path, is_loss_accepted=is_loss_accepted)


@pytest.mark.parametrize('table', ['runs', 'futures', 'row_seals'])
@pytest.mark.parametrize('column', ['type', 'name', 'tbl_name', 'sql'])
async def test_definition_of_bytes_is_reported_until_accepted(tmp_path: Path, column: str, table: str) -> None:
    """A changed type of a value in a definition, which SQLite accepts, is reported. All content remains readable."""
    content = await _with_definition(tmp_path, f'{column} = CAST({column} AS BLOB)', table)
    with pytest.raises(DatabaseDamaged, match=r'gateway\.db is damaged: .*sqlite_schema'):
        await _open(tmp_path)
    opened = await _open(tmp_path, is_loss_accepted=True)
    assert await opened.content() == content
    await opened.close()


async def test_rows_with_invalid_text_are_damaged_once_accepted(tmp_path: Path) -> None:
    """A stored text that is not UTF-8 is reported as damaged, and not as an unreachable database."""
    await _with_definition(tmp_path, 'sql = sql', 'futures')
    with closing(sqlite3.connect(tmp_path / 'gateway.db')) as connection:
        connection.create_function('row_seal', -1, lambda *_: b'')
        connection.execute("UPDATE futures SET kind = CAST(x'6bff' AS TEXT)")
        connection.commit()
    with pytest.raises(DatabaseDamaged, match='futures'):
        await _open(tmp_path)
    opened = await _open(tmp_path, is_loss_accepted=True)
    with pytest.raises(StoredRowDamaged, match='kind'):
        await opened.content()
    await opened.close()


async def test_futures_beside_a_damaged_one_are_resumed(tmp_path: Path) -> None:
    """A gateway with accepted damage reads the waiting futures whose rows are not damaged."""
    opened = await _open(tmp_path)
    await opened.fill()
    damaged = _future('damaged')
    await opened.records.store.add_if_absent(damaged)
    await opened.close()
    with closing(sqlite3.connect(tmp_path / 'gateway.db')) as connection:
        connection.create_function('row_seal', -1, lambda *_: b'')
        update = "UPDATE futures SET note = CAST(x'6bff' AS TEXT) WHERE future_id = ?"
        connection.execute(update, (damaged.future_id,))
        connection.commit()
    opened = await _open(tmp_path, is_loss_accepted=True)
    assert [future.future_id for future in await opened.records.store.list_waiting()] == [WAITING.future_id]
    await opened.close()


@pytest.mark.parametrize('damage', ["name = ''", "name <> 'nothing'"])
async def test_lost_counter_of_transactions_is_restored_once_accepted(tmp_path: Path, damage: str) -> None:
    """A database without its counter of transactions, or without seals, is refused, and usable after acceptance."""
    content = await _with_definition(tmp_path, 'sql = sql', 'row_seals')
    with closing(sqlite3.connect(tmp_path / 'gateway.db')) as connection:
        connection.execute(f'DELETE FROM row_seals WHERE {damage}')
        connection.commit()
    with pytest.raises(DatabaseDamaged, match='lost its last'):
        await _open(tmp_path)
    for is_loss_accepted in (True, False):
        opened = await _open(tmp_path, is_loss_accepted=is_loss_accepted)
        assert await opened.content() == content
        await opened.close()


@pytest.mark.parametrize(
    ('name', 'content', 'expected'),
    [
        ('key_pepper', None, 'is missing, but the database has API keys'),
        pytest.param('key_pepper', b'short', 'is damaged, so no API key could be verified', marks=pytest.mark.slow),
        ('gateway.db', b'not a database' * 500, 'gateway.db is damaged'),
        pytest.param('gateway.db', None, 'lost its last', marks=pytest.mark.slow),
    ],
)
async def test_gateway_process_names_the_damaged_file(
    tmp_path: Path, name: str, content: bytes | None, expected: str
) -> None:
    """A gateway with a damaged file exits with a message that names the file, without a traceback."""
    folder = await _killed(tmp_path)
    for log in folder.glob('gateway.db-[ws]*'):
        log.unlink()
    opened = await _open(folder, is_loss_accepted=True)
    await opened.fill()
    await opened.close()
    apply(folder / name, content)
    fields = {'state_dir': folder, 'bootstrap_key': ADMIN_KEY, 'listen': '127.0.0.1:0'}
    arguments = [word for field, value in fields.items() for word in ('--set', f'{field}={value}')]
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-m', 'twinkle_services.gateway', *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert expected in errors.decode()
    assert name in errors.decode()
    assert 'Traceback' not in errors.decode()


async def test_gateway_starts_without_lost_transactions_if_the_loss_is_accepted(tmp_path: Path) -> None:
    """A database that lost transactions is refused until the loss is accepted, and is used normally afterwards."""
    folder = await _killed(tmp_path)
    (folder / 'gateway.db-wal').unlink()
    with pytest.raises(DatabaseDamaged, match=r'lost its last \d+ transactions.*accept_data_loss: true'):
        await _open(folder)
    opened = await _open(folder, is_loss_accepted=True)
    await opened.fill()
    await opened.close()
    assert isinstance(await _read(folder), list)
