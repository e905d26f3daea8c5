"""Commands whose options are the fields of a dataclass."""

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from twinkle_client.cli import app as twinkle
from twinkle_client.cli.options import with_options

runner = CliRunner()


@dataclass(frozen=True, kw_only=True)
class Given:
    """Options of a command."""

    name: Annotated[str, typer.Argument(help='Whom to greet.')]
    words: Annotated[list[str] | None, typer.Option('--word', help='Further words.')] = None
    is_loud: Annotated[bool, typer.Option('--loud', help='In capitals.')] = False


def greet(given: Given) -> None:
    """Say hello."""
    text = ' '.join(['hello', given.name, *(given.words or [])])
    typer.echo(text.upper() if given.is_loud else text)


def make_app() -> typer.Typer:
    """Return a program of one command."""
    app = typer.Typer()
    app.command()(with_options(greet))
    return app


def test_fields_become_options_and_arguments() -> None:
    """With their defaults; one without a default is required."""
    assert runner.invoke(make_app(), ['you']).output == 'hello you\n'
    assert runner.invoke(make_app(), ['you', '--loud', '--word', 'a', '--word', 'b']).output == 'HELLO YOU A B\n'
    assert runner.invoke(make_app(), []).exit_code == 2


def test_help_names_every_field() -> None:
    """The docstring explains the command, as it would of a plain function."""
    shown = runner.invoke(make_app(), ['--help']).output
    for word in ('Say hello.', 'name', 'Whom to greet.', '--word', 'Further words.', '--loud', 'In capitals.'):
        assert word in shown


def test_up_is_refused_what_it_cannot_be() -> None:
    """Options are checked as before."""
    for arguments in (['--samplers', '65'], ['--samplers', 'two'], ['--config', '/nowhere.yaml'], ['--tsl']):
        assert runner.invoke(twinkle, ['up', *arguments]).exit_code == 2
