"""The command line of `./run cookbook`."""

import pytest

from e2e.cookbook.__main__ import main


@pytest.mark.parametrize(
    ('arguments', 'option'),
    [
        (['--limit', '0'], '--limit'),
        (['--limit', '-5'], '--limit'),
        (['--limit', 'nan'], '--limit'),
        (['--engine', 'jax'], '--engine'),
        (['no_recipe'], 'RECIPE'),
    ],
)
def test_invalid_options_are_rejected_by_name(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid option is refused with status 2 before anything is started, and the error names the option."""
    with pytest.raises(SystemExit) as refusal:
        main(arguments)
    assert refusal.value.code == 2
    assert f'error: argument {option}: ' in capsys.readouterr().err
