"""`twinkle quota` and `twinkle usage`: what tenants may use, and what they used."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from rich.table import Table

from twinkle.api.gateway.v1 import quota_service_pb2 as pb
from twinkle_client.cli.durations import parse_duration
from twinkle_client.cli.session import StateDirOption, console, open_client
from twinkle_client.quotas import Quotas

app = typer.Typer(help='Quotas of tenants, for administrators.', no_args_is_help=True)
TenantArgument = Annotated[str, typer.Argument(help='Whose quota.')]
JsonOption = Annotated[bool, typer.Option('--json', help='Print JSON.')]
_DEFAULT = 'default'
_LIMITS: Mapping[str, Callable[[str], float]] = {
    'max_adapters': int,
    'tokens_per_second': int,
    'burst_tokens': int,
    'concurrent_samples': int,
    'stored_bytes': int,
    'weight': float,
}
"""The limits, and how each is read."""
_COUNTS = (
    'operation_count',
    'trained_token_count',
    'prompt_count',
    'prompt_token_count',
    'sampled_token_count',
    'stored_bytes',
)


@app.command('show')
def show(tenant: TenantArgument = 'default', is_json: JsonOption = False, state_dir: StateDirOption = None) -> None:
    """Show what a tenant may use."""
    with open_client(state_dir) as client:
        found = Quotas(client=client).get(tenant)
    _print_quota(found.quota, found.effective_quota, is_json=is_json)


@app.command('set')
def change(
    tenant: TenantArgument,
    limits: Annotated[
        list[str],
        typer.Argument(help=f"LIMIT=NUMBER; limits: {', '.join(_LIMITS)}; '{_DEFAULT}': as the server is configured."),
    ],
    state_dir: StateDirOption = None,
) -> None:
    """Change what a tenant may use, such as `max_adapters=4 weight=2`; limits that are not named stay as they are."""
    wanted = dict(limit_of(text) for text in limits)
    with open_client(state_dir) as client:
        quotas = Quotas(client=client)
        quota: Any = quotas.get(tenant).quota
        for name, value in wanted.items():
            quota.ClearField(name)
            if value is not None:
                setattr(quota, name, value)
        changed = quotas.set(tenant, quota)
    _print_quota(changed.quota, changed.effective_quota, is_json=False)


def usage(
    tenant: Annotated[str, typer.Argument(help='Whose, for administrators. Empty: your own.')] = '',
    since: Annotated[str, typer.Option(help='Only of the last so long, such as 24h or 30d; whole hours.')] = '',
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Show what was used: training operations and tokens, samples, bytes stored, a run a line."""
    begin = datetime.now(UTC) - parse_duration(since) if since else None
    with open_client(state_dir) as client:
        used: Any = Quotas(client=client).usage(tenant, begin=begin)
    rows = [{'run_id': item.run_id, **{name: getattr(item, name) for name in _COUNTS}} for item in used]
    if is_json:
        console.print_json(json.dumps(rows))
        return
    table = Table('run')
    for title in ('operations', 'trained', 'prompts', 'prompt tokens', 'sampled', 'stored'):
        table.add_column(title, justify='right')
    for row in rows:
        table.add_row(row['run_id'] or '(base model)', *(f'{row[name]:,}' for name in _COUNTS))
    table.add_section()
    table.add_row('all', *(f'{sum(row[name] for row in rows):,}' for name in _COUNTS))
    console.print(table)


def limit_of(text: str) -> tuple[str, float | None]:
    """Return the limit that a person wrote, and its number; None where it is to be the configured one.

    Raises:
        typer.BadParameter: it is neither that word nor a number, or of no limit.
    """
    name, _, number = text.partition('=')
    if name not in _LIMITS:
        raise typer.BadParameter(f'{text!r}: give LIMIT=NUMBER; the limits are {", ".join(_LIMITS)}')
    if number == _DEFAULT:
        return name, None
    try:
        return name, _LIMITS[name](number)
    except ValueError as error:
        raise typer.BadParameter(f'{text!r}: {number!r} is no number, nor {_DEFAULT!r}') from error


def _print_quota(quota: pb.Quota, effective: pb.Quota, *, is_json: bool) -> None:
    if is_json:
        said = {'quota': quota, 'effective_quota': effective}
        told = {name: MessageToDict(item, preserving_proto_field_name=True) for name, item in said.items()}
        console.print_json(json.dumps(told))
        return
    table = Table('limit', 'set', 'counts')
    for name in _LIMITS:
        table.add_row(name, *(_word(item, name) for item in (quota, effective)))
    console.print(table)


def _word(quota: Any, name: str) -> str:
    return f'{getattr(quota, name):,}' if quota.HasField(name) else '-'
