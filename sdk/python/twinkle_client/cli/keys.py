"""`twinkle keys`: API keys, for administrators."""

from typing import Annotated

import typer
from rich.table import Table

from twinkle.api.gateway.v1 import key_service_pb2
from twinkle_client.administration import SCOPES, KeyAdministration
from twinkle_client.cli.session import StateDirOption, console, open_client

app = typer.Typer(help='API keys, for administrators.', no_args_is_help=True)
_NAMES = {number: name for name, number in SCOPES.items()}


@app.command('create')
def create(
    tenant: Annotated[str, typer.Argument(help='Whom the key speaks for.')],
    scopes: Annotated[str, typer.Option('--scopes', help=f'Of {", ".join(SCOPES)}.')] = 'train,sample,data',
    name: Annotated[str, typer.Option('--name', help='For people to read.')] = '',
    state_dir: StateDirOption = None,
) -> None:
    """Create a key and print its secret, which is never shown again."""
    with open_client(state_dir) as client:
        keys = KeyAdministration(client=client)
        _, secret = keys.create_key(tenant, scopes=[part for part in scopes.split(',') if part], display_name=name)
    console.print(secret, highlight=False, soft_wrap=True)


@app.command('list')
def names(
    tenant: Annotated[str, typer.Argument(help='Whose keys.')] = 'default',
    state_dir: StateDirOption = None,
) -> None:
    """List a tenant's keys."""
    with open_client(state_dir) as client:
        keys = KeyAdministration(client=client).list_keys(tenant)
    table = Table('key', 'name', 'scopes', 'state')
    for item in keys:
        scopes = ', '.join(_NAMES.get(scope, '?') for scope in item.scopes)
        table.add_row(item.key_id, item.display_name, scopes, _state(item))
    console.print(table)


@app.command('revoke')
def revoke(
    key_id: Annotated[str, typer.Argument(help='The part of the key that is shown in lists.')],
    state_dir: StateDirOption = None,
) -> None:
    """Make a key worthless from now on."""
    with open_client(state_dir) as client:
        KeyAdministration(client=client).revoke_key(key_id)


def _state(key: key_service_pb2.ApiKey) -> str:
    return 'revoked' if key.HasField('revoke_time') else 'good'
