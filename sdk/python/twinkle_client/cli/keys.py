"""`twinkle keys`: API keys, for administrators."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.table import Table

from twinkle.api.gateway.v1 import key_service_pb2
from twinkle_client.administration import SCOPES, KeyAdministration
from twinkle_client.cli.durations import parse_duration
from twinkle_client.cli.moments import local_text
from twinkle_client.cli.session import StateDirOption, console, error_console, open_client

app = typer.Typer(help='API keys, for administrators.', no_args_is_help=True)
KeyArgument = Annotated[str, typer.Argument(help='The part of the key that is shown in lists.')]
_NAMES = {number: name for name, number in SCOPES.items()}


@app.command('create')
def create(
    tenant: Annotated[str, typer.Argument(help='Whom the key speaks for; made if it is new.')],
    scopes: Annotated[str, typer.Option('--scopes', help=f'Of {", ".join(SCOPES)}.')] = 'train,sample,data',
    name: Annotated[str, typer.Option('--name', help='For people to read.')] = '',
    ttl: Annotated[
        timedelta | None,
        typer.Option('--ttl', parser=parse_duration, metavar='TIME', help='How long it lasts, such as 30d.'),
    ] = None,
    project: Annotated[str, typer.Option('--project', help='Where its sessions belong.')] = '',
    state_dir: StateDirOption = None,
) -> None:
    """Create a key and print its secret, which is never shown again."""
    with open_client(state_dir) as client:
        keys = KeyAdministration(client=client)
        wanted = [word for part in scopes.split(',') if (word := part.strip())]
        _, secret = keys.create_key(tenant, scopes=wanted, display_name=name, ttl=ttl, project_id=project)
    _print_secret(secret)


@app.command('list')
def names(
    tenant: Annotated[str, typer.Argument(help='Whose keys.')] = 'default',
    state_dir: StateDirOption = None,
) -> None:
    """List a tenant's keys."""
    with open_client(state_dir) as client:
        keys = KeyAdministration(client=client).list_keys(tenant)
    table = Table()
    for title in ('key', 'name', 'project', 'scopes', 'state', 'replaces'):
        table.add_column(title, overflow='fold')
    for item in keys:
        scopes = ', '.join(_NAMES.get(scope, '?') for scope in item.scopes)
        table.add_row(item.key_id, item.display_name, item.project_id, scopes, state_word(item), item.replaces_key_id)
    console.print(table)


@app.command('rotate')
def rotate(
    key_id: KeyArgument,
    overlap: Annotated[
        timedelta | None,
        typer.Option('--overlap', parser=parse_duration, metavar='TIME', help='How long the old one works. Unset: 1d.'),
    ] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Replace a key: print the secret of a new one with the same rights; the old one works a while longer."""
    with open_client(state_dir) as client:
        _, secret, old = KeyAdministration(client=client).rotate_key(key_id, overlap=overlap)
    error_console.print(f'{old.key_id}: {state_word(old)}', highlight=False)
    _print_secret(secret)


@app.command('revoke')
def revoke(key_id: KeyArgument, state_dir: StateDirOption = None) -> None:
    """Make a key worthless from now on."""
    with open_client(state_dir) as client:
        KeyAdministration(client=client).revoke_key(key_id)


def state_word(key: key_service_pb2.ApiKey) -> str:
    """Return whether a key works, and until when, in a few words."""
    if key.HasField('revoke_time'):
        return 'revoked'
    ends = {name: getattr(key, name) for name in ('retire_time', 'expire_time') if key.HasField(name)}
    if not ends:
        return 'good'
    name, end = min(ends.items(), key=lambda item: item[1].ToDatetime(UTC))
    if end.ToDatetime(UTC) <= datetime.now(UTC):
        return 'replaced' if name == 'retire_time' else 'expired'
    return f'good until {local_text(end)}'


def _print_secret(secret: str) -> None:
    console.print(secret, highlight=False, soft_wrap=True)
