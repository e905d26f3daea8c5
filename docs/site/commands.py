"""The page of the command line, from the help of each command."""

from collections.abc import Iterator
from typing import Any

import click
import typer
from typer.testing import CliRunner

from twinkle_client.cli.app import app

_INTRODUCTION = """# Command line

`twinkle` is installed with the client; in a checkout, `./run twinkle` is the same. Commands find the stack of this
machine that `twinkle up` started, or the gateway in `TWINKLE_SERVER_URL` with the key in `TWINKLE_API_KEY`.

"""
_WIDTH = 100
"""Width of the help texts in characters."""


def commands_page() -> str:
    """Return the page with the help of every command."""
    lines = [_INTRODUCTION]
    for words in command_names(typer.main.get_command(app)):
        lines += [f'## {" ".join(["twinkle", *words])}', '', '```text', help_of(words), '```', '']
    return '\n'.join(lines)


def command_names(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command that is not a group, in the order in which the help lists them."""
    commands: dict[str, Any] | None = getattr(command, 'commands', None)
    if commands is None:
        yield words
        return
    for name, inner in commands.items():
        yield from command_names(inner, (*words, name))


def help_of(words: tuple[str, ...]) -> str:
    """Return the help of a command as plain text.

    Raises:
        click.ClickException: The command has no help.
    """
    environment = {'COLUMNS': str(_WIDTH), 'TERMINAL_WIDTH': str(_WIDTH), 'NO_COLOR': '1', 'TERM': 'dumb'}
    result = CliRunner().invoke(app, [*words, '--help'], env=environment, prog_name='twinkle')
    if result.exit_code:
        raise click.ClickException(f'twinkle {" ".join(words)} --help failed: {result.output}')
    return '\n'.join(line.rstrip() for line in result.output.splitlines()).strip()
