"""Tests of ids and names in terminal output."""

import re

import pytest
from rich.console import Console
from rich.table import Table

from fixtures.source_tree import modules
from twinkle_client.cli.session import console, error_console


@pytest.mark.parametrize('output', [console, error_console])
def test_ids_are_printed_unchanged(output: Console) -> None:
    """An id that contains the name of an emoji is printed unchanged, in lines and in tables."""
    table = Table()
    table.add_column('run')
    table.add_row('ses-1:train:0')
    with output.capture() as captured:
        output.print('ses-1:train:0')
        output.print(table)
    assert captured.get().count('ses-1:train:0') == 2


def test_every_console_prints_ids_unchanged() -> None:
    """The consoles of the client and of the library do not replace names of emoji."""
    found = [
        f'{module.path}: {call}'
        for module in modules('sdk/python/')
        for call in re.findall(r'\bConsole\([^)]*\)', module.text)
        if 'emoji=False' not in call
    ]
    assert found == []
