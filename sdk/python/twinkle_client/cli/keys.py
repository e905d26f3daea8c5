"""`twinkle keys`: administration of API keys."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.table import Table

from twinkle.api.gateway.v1 import key_service_pb2
from twinkle_client.administration import SCOPES, KeyAdministration
from twinkle_client.cli.options import with_options
from twinkle_client.cli.session import (
    JsonOption,
    StateDirOption,
    console,
    error_console,
    message_json,
    open_client,
    print_json,
    print_rows,
)
from twinkle_client.cli.times import local_text, parse_duration

app = typer.Typer(help='Manage API keys (administrators only).', no_args_is_help=True)
KeyArgument = Annotated[str, typer.Argument(help='Key id, as listed by `twinkle keys list`.')]
_NAMES = {number: name for name, number in SCOPES.items()}


@dataclass(frozen=True, kw_only=True)
class KeyOptions:
    """Options of `twinkle keys create`."""

    tenant: Annotated[str, typer.Argument(help='Tenant of the key; created if it does not exist.')]
    scopes: Annotated[str, typer.Option('--scopes', help=f'Comma-separated scopes out of {", ".join(SCOPES)}.')] = (
        'train,sample,data'
    )
    name: Annotated[str, typer.Option('--name', help='Display name.')] = ''
    ttl: Annotated[
        timedelta | None,
        typer.Option('--ttl', parser=parse_duration, metavar='TIME', help='Lifetime, such as 30d. Default: unlimited.'),
    ] = None
    project: Annotated[str, typer.Option('--project', help="Default project of the key's sessions.")] = ''
    is_json: JsonOption = False
    state_dir: StateDirOption = None


def create(given: KeyOptions) -> None:
    """Create a key and print its secret, which cannot be shown again."""
    wanted = [word for part in given.scopes.split(',') if (word := part.strip())]
    with open_client(given.state_dir) as client:
        key, secret = KeyAdministration(client=client).create_key(
            given.tenant, scopes=wanted, display_name=given.name, ttl=given.ttl, project_id=given.project
        )
    _print_secret(key, secret, is_json=given.is_json)


app.command('create')(with_options(create))


@app.command('list')
def names(
    tenant: Annotated[str, typer.Argument(help='Tenant id.')] = 'default',
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """List a tenant's keys."""
    with open_client(state_dir) as client:
        keys = KeyAdministration(client=client).list_keys(tenant)
    if is_json:
        print_json([_key_json(item) for item in keys])
        return
    table = Table('key', 'name', 'project', 'scopes', 'state', 'replaces')
    for item in keys:
        scopes = ', '.join(_NAMES.get(scope, '?') for scope in item.scopes)
        table.add_row(item.key_id, item.display_name, item.project_id, scopes, state_word(item), item.replaces_key_id)
    print_rows(table, empty=f'tenant {tenant} has no keys')


@app.command('rotate')
def rotate(
    key_id: KeyArgument,
    overlap: Annotated[
        timedelta | None,
        typer.Option(
            '--overlap', parser=parse_duration, metavar='TIME', help='Time the old key remains valid. Default: 1d.'
        ),
    ] = None,
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Replace a key and print the secret of the new key.

    The new key has the same tenant, project and scopes. The old key remains valid for the overlap.
    """
    with open_client(state_dir) as client:
        new, secret, old = KeyAdministration(client=client).rotate_key(key_id, overlap=overlap)
    error_console.print(f'{old.key_id}: {state_word(old)}', highlight=False)
    _print_secret(new, secret, is_json=is_json)


@app.command('revoke')
def revoke(key_id: KeyArgument, state_dir: StateDirOption = None) -> None:
    """Revoke a key. Other gateways on the same database may accept it for a few more seconds."""
    with open_client(state_dir) as client:
        KeyAdministration(client=client).revoke_key(key_id)


def state_word(key: key_service_pb2.ApiKey) -> str:
    """Return the display text of a key's state."""
    if key.HasField('revoke_time'):
        return 'revoked'
    ends = {name: getattr(key, name) for name in ('retire_time', 'expire_time') if key.HasField(name)}
    if not ends:
        return 'good'
    name, end = min(ends.items(), key=lambda item: item[1].ToDatetime(UTC))
    if end.ToDatetime(UTC) <= datetime.now(UTC):
        return 'replaced' if name == 'retire_time' else 'expired'
    return f'good until {local_text(end)}'


def _key_json(key: key_service_pb2.ApiKey) -> dict[str, object]:
    scopes = [_NAMES.get(scope, '?') for scope in key.scopes]
    return {**message_json(key), 'scopes': scopes, 'state': state_word(key)}


def _print_secret(key: key_service_pb2.ApiKey, secret: str, *, is_json: bool) -> None:
    if is_json:
        print_json({**_key_json(key), 'secret': secret})
        return
    console.print(secret, highlight=False, soft_wrap=True)
