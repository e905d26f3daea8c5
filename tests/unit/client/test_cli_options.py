"""Commands whose options are the fields of a dataclass."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from twinkle_client.cli import app as twinkle
from twinkle_client.cli.options import with_options
from twinkle_client.cli.stack import UpOptions
from twinkle_client.stack import StackOptions

runner = CliRunner()


@dataclass(frozen=True, kw_only=True)
class GreetingOptions:
    """Options of `greet`."""

    name: Annotated[str, typer.Argument(help='Whom to greet.')]
    words: Annotated[list[str] | None, typer.Option('--word', help='Further words.')] = None
    is_loud: Annotated[bool, typer.Option('--loud', help='In capitals.')] = False


def greet(options: GreetingOptions) -> None:
    """Print a greeting."""
    text = ' '.join(['hello', options.name, *(options.words or [])])
    typer.echo(text.upper() if options.is_loud else text)


def make_app() -> typer.Typer:
    """Return a program of one command."""
    app = typer.Typer()
    app.command()(with_options(greet))
    return app


def test_fields_become_options_and_arguments() -> None:
    """Fields with defaults become options, and a field without a default is a required argument."""
    assert runner.invoke(make_app(), ['you']).output == 'hello you\n'
    assert runner.invoke(make_app(), ['you', '--loud', '--word', 'a', '--word', 'b']).output == 'HELLO YOU A B\n'
    assert runner.invoke(make_app(), []).exit_code == 2


def test_help_names_every_field() -> None:
    """The help shows the command's docstring and every field with its description."""
    shown = runner.invoke(make_app(), ['--help']).output
    for word in ('Print a greeting.', 'name', 'Whom to greet.', '--word', 'Further words.', '--loud', 'In capitals.'):
        assert word in shown


def test_up_refuses_invalid_options() -> None:
    """`twinkle up` exits with status 2 for values out of range, non-numbers, missing files and unknown options."""
    for arguments in (['--samplers', '65'], ['--samplers', 'two'], ['--config', '/nowhere.yaml'], ['--tsl']):
        assert runner.invoke(twinkle, ['up', *arguments]).exit_code == 2


@pytest.mark.parametrize(
    ('arguments', 'listen', 'http_listen'),
    [
        ({}, None, None),
        ({'port': 7000}, '0.0.0.0:7000', None),
        ({'http_port': 0}, None, '127.0.0.1:0'),
        ({'port': 1, 'http_port': 65535}, '0.0.0.0:1', '127.0.0.1:65535'),
    ],
)
def test_ports_replace_those_of_the_configuration(
    tmp_path: Path, arguments: Any, listen: Any, http_listen: Any
) -> None:
    """`--port` and `--http-port` keep the configured hosts; without a configured host, they use loopback."""
    configured = StackOptions(state_dir=tmp_path, listen='0.0.0.0:9', http_listen='')
    chosen = UpOptions(**arguments).choices(configured)
    assert (chosen.get('listen'), chosen.get('http_listen')) == (listen, http_listen)
