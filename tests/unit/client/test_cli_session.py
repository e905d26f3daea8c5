"""What the commands share."""

import pytest
import typer

from twinkle_client.cli.session import exit_on_interrupt


def test_an_interrupt_says_how_things_stand(capsys: pytest.CaptureFixture[str]) -> None:
    """And ends with the status that shells expect; anything else goes through."""
    with pytest.raises(typer.Exit) as ended, exit_on_interrupt('it goes on'):
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert 'it goes on' in capsys.readouterr().err
    with pytest.raises(ValueError, match='other'), exit_on_interrupt('it goes on'):
        raise ValueError('other')
