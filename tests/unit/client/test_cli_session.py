"""Tests of behaviour that all commands share."""

import pytest
import typer

from twinkle_client.cli.session import exit_on_interrupt


def test_interrupt_prints_its_message(capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupt prints the message and exits with status 130; other exceptions pass through."""
    with pytest.raises(typer.Exit) as exit_error, exit_on_interrupt('training continues'):
        raise KeyboardInterrupt
    assert exit_error.value.exit_code == 130
    assert 'training continues' in capsys.readouterr().err
    with pytest.raises(ValueError, match='other'), exit_on_interrupt('training continues'):
        raise ValueError('other')
