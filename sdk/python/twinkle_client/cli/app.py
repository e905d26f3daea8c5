"""The root of the command line interface, to which all commands are added."""

from importlib.metadata import version
from typing import Annotated

import typer

from twinkle_client.cli import (
    certificates,
    checkpoints,
    console,
    fleet,
    keys,
    logs,
    models,
    planning,
    quotas,
    run,
    runs,
    sampling,
    stack,
    tenants,
    traces,
)
from twinkle_client.cli.options import with_options

app = typer.Typer(
    name='twinkle',
    help='Train and sample language models with Twinkle.',
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    is_version: Annotated[bool, typer.Option('--version', help='Print the version and exit.')] = False,
) -> None:
    """Train and sample language models with Twinkle."""
    if is_version:
        typer.echo(f'twinkle {version("twinkle-grpc")}')
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail('Missing command.')


app.command('up')(with_options(stack.up))
app.command('status')(stack.status)
app.command('logs')(logs.logs)
app.command('down')(stack.down)
app.command('console')(console.console)
app.command('sample')(with_options(sampling.sample))
app.command('estimate')(with_options(planning.estimate))
app.command('runs')(runs.runs)
app.command('certs')(certificates.certs)
app.command('trace')(traces.trace)
app.command('usage')(quotas.usage)
app.add_typer(run.app, name='run')
app.add_typer(checkpoints.app, name='checkpoint')
app.add_typer(fleet.app, name='fleet')
app.add_typer(models.app, name='models')
app.add_typer(keys.app, name='keys')
app.add_typer(quotas.app, name='quota')
app.add_typer(tenants.app, name='tenants')
app.add_typer(tenants.projects_app, name='projects')
