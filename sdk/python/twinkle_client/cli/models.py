"""`twinkle models`: downloads base models, and lists the built-in models."""

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from twinkle.data_format import BASE_MODEL_ALIASES
from twinkle_client.cli.session import JsonOption, console, exit_on_interrupt, fail, print_json

app = typer.Typer(help='Download base models.', no_args_is_help=True)


@app.command('get')
def get(name: Annotated[str, typer.Argument(help='Built-in name, hub id or folder.')]) -> None:
    """Download a model if necessary and print its folder."""
    with exit_on_interrupt('run the command again to resume'):
        folder = fetch(name)
    console.print(str(folder), highlight=False, soft_wrap=True)


@app.command('list')
def names(is_json: JsonOption = False) -> None:
    """List the built-in models with their aliases."""
    aliases = {hub_id: alias for alias, hub_id in BASE_MODEL_ALIASES.items()}
    if is_json:
        print_json([{'name': name, 'alias': aliases[name]} for name in _hub().BUILT_IN_MODELS])
        return
    for name in _hub().BUILT_IN_MODELS:
        console.print(f'{name} (alias {aliases[name]})', highlight=False, soft_wrap=True)


def fetch(name: str) -> Path:
    """Return a model's folder, downloading it if necessary; exit on failure."""
    hub = _hub()
    try:
        return hub.resolve_model(name)
    except hub.HubError as error:
        fail(str(error))


def _hub() -> Any:
    # The dependencies of `twinkle.hub` are installed with the services, not with the client alone.
    try:
        return importlib.import_module('twinkle.hub')
    except ImportError as error:
        fail(f"{error.name} is missing: pip install 'twinkle-grpc[all]'")
