"""`twinkle tenants` and `twinkle projects`: administration of tenants and their projects."""

from typing import Annotated

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table

from twinkle_client.administration import KeyAdministration
from twinkle_client.cli.session import (
    JsonOption,
    StateDirOption,
    message_json,
    open_client,
    print_json,
    print_rows,
)
from twinkle_client.cli.times import local_text

app = typer.Typer(help='Manage tenants (administrators only).', no_args_is_help=True)
projects_app = typer.Typer(help='Manage projects of tenants (administrators only).', no_args_is_help=True)
TenantArgument = Annotated[str, typer.Argument(help='Tenant id: 1 to 64 lower-case letters, digits and hyphens.')]
NameOption = Annotated[str, typer.Option('--name', help='Display name.')]


@app.command('create')
def create(tenant: TenantArgument, name: NameOption = '', state_dir: StateDirOption = None) -> None:
    """Create a tenant. An existing tenant remains unchanged."""
    with open_client(state_dir) as client:
        KeyAdministration(client=client).create_tenant(tenant, display_name=name)


@app.command('list')
def tenants(is_json: JsonOption = False, state_dir: StateDirOption = None) -> None:
    """List tenants, newest first."""
    with open_client(state_dir) as client:
        found = KeyAdministration(client=client).list_tenants()
    if is_json:
        print_json([message_json(item) for item in found])
        return
    rows = [(item.tenant_id, item.display_name, item.create_time) for item in found]
    print_rows(_table('tenant', rows), empty='no tenants yet')


@projects_app.command('create')
def create_project(
    tenant: TenantArgument,
    project: Annotated[str, typer.Argument(help='Project id, unique within the tenant.')],
    name: NameOption = '',
    state_dir: StateDirOption = None,
) -> None:
    """Create a project of a tenant. An existing project remains unchanged."""
    with open_client(state_dir) as client:
        KeyAdministration(client=client).create_project(tenant, project, display_name=name)


@projects_app.command('list')
def projects(
    tenant: Annotated[str, typer.Argument(help='Tenant id.')] = 'default',
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """List a tenant's projects, newest first."""
    with open_client(state_dir) as client:
        found = KeyAdministration(client=client).list_projects(tenant)
    if is_json:
        print_json([message_json(item) for item in found])
        return
    rows = [(item.project_id, item.display_name, item.create_time) for item in found]
    print_rows(_table('project', rows), empty=f'tenant {tenant} has no projects')


def _table(title: str, rows: list[tuple[str, str, Timestamp]]) -> Table:
    table = Table(title, 'name', 'created')
    for item_id, name, moment in rows:
        table.add_row(item_id, name, local_text(moment))
    return table
