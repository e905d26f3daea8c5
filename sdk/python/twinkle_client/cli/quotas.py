"""`twinkle quota` and `twinkle usage`: quotas and usage of tenants."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from twinkle.api.gateway.v1 import quota_service_pb2 as pb
from twinkle_client.cli.session import (
    JsonOption,
    StateDirOption,
    console,
    message_json,
    open_client,
    print_json,
    print_rows,
)
from twinkle_client.cli.times import parse_duration
from twinkle_client.quotas import Quotas

app = typer.Typer(help='Manage quotas of tenants (administrators only).', no_args_is_help=True)
TenantArgument = Annotated[str, typer.Argument(help='Tenant id.')]
_DEFAULT = 'default'
_LIMITS: Mapping[str, Callable[[str], float]] = {
    'max_adapters': int,
    'tokens_per_second': int,
    'burst_tokens': int,
    'concurrent_samples': int,
    'stored_bytes': int,
    'weight': float,
    'metric_points': int,
}
"""Parser of each limit."""
_COUNTS = (
    'operation_count',
    'trained_token_count',
    'prompt_count',
    'prompt_token_count',
    'sampled_token_count',
    'stored_bytes',
    'metric_point_count',
)


@app.command('show')
def show(tenant: TenantArgument = 'default', is_json: JsonOption = False, state_dir: StateDirOption = None) -> None:
    """Show the quota of a tenant."""
    with open_client(state_dir) as client:
        found = Quotas(client=client).get(tenant)
    _print_quota(found.quota, found.effective_quota, is_json=is_json)


@app.command('set')
def change(
    tenant: TenantArgument,
    limits: Annotated[
        list[str],
        typer.Argument(
            help=f"LIMIT=NUMBER, or LIMIT={_DEFAULT} for the server's configured value. Limits: {', '.join(_LIMITS)}."
        ),
    ],
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Change limits of a tenant's quota, for example `max_adapters=4 weight=2`. Other limits remain unchanged."""
    changes = dict(limit_of(text) for text in limits)
    with open_client(state_dir) as client:
        quotas = Quotas(client=client)
        quota: Any = quotas.get(tenant).quota
        for name, value in changes.items():
            quota.ClearField(name)
            if value is not None:
                setattr(quota, name, value)
        changed = quotas.set(tenant, quota)
    _print_quota(changed.quota, changed.effective_quota, is_json=is_json)


def usage(
    tenant: Annotated[str, typer.Argument(help='Tenant id (administrators only). Default: your tenant.')] = '',
    since: Annotated[str, typer.Option(help='Length of the period, such as 24h or 30d. Default: unlimited.')] = '',
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Show the usage per run: training operations and tokens, samples, stored bytes, and stored points of metrics."""
    begin = datetime.now(UTC) - parse_duration(since) if since else None
    with open_client(state_dir) as client:
        used: Any = Quotas(client=client).usage(tenant, begin=begin)
    rows = [{'run_id': item.run_id, **{name: getattr(item, name) for name in _COUNTS}} for item in used]
    if is_json:
        print_json(rows)
        return
    names = [row['run_id'] or '(base model)' for row in rows]
    columns = ('operations', 'trained', 'prompts', 'prompt tokens', 'sampled', 'stored', 'metric points')
    table = Table('run', *columns)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = 'right'
    for name, row in zip(names, rows, strict=True):
        table.add_row(name, *(f'{row[name]:,}' for name in _COUNTS))
    if rows:
        table.add_section()
        table.add_row('total', *(f'{sum(row[name] for row in rows):,}' for name in _COUNTS))
    print_rows(table, empty='no usage yet')


def limit_of(text: str) -> tuple[str, float | None]:
    """Parse LIMIT=NUMBER and return the name and the number; for LIMIT=default, the number becomes None.

    Raises:
        typer.BadParameter: The limit is unknown, or the value is neither a number nor 'default'.
    """
    name, _, number = text.partition('=')
    if name not in _LIMITS:
        raise typer.BadParameter(f'{text!r}: use LIMIT=NUMBER; limits are {", ".join(_LIMITS)}')
    if number == _DEFAULT:
        return name, None
    try:
        return name, _LIMITS[name](number)
    except ValueError as error:
        raise typer.BadParameter(f'{text!r}: {number!r} is neither a valid number nor {_DEFAULT!r}') from error


def _print_quota(quota: pb.Quota, effective: pb.Quota, *, is_json: bool) -> None:
    if is_json:
        messages = {'quota': quota, 'effective_quota': effective}
        print_json({name: message_json(item) for name, item in messages.items()})
        return
    table = Table('limit', 'set', 'effective')
    for name in _LIMITS:
        table.add_row(name, *(_value_text(item, name) for item in (quota, effective)))
    console.print(table)


def _value_text(quota: Any, name: str) -> str:
    return f'{getattr(quota, name):,}' if quota.HasField(name) else '-'
