"""How people write a length of time: `30d`, `12h`, `90s`."""

import re
from datetime import timedelta

import typer

_UNITS = {'s': 'seconds', 'm': 'minutes', 'h': 'hours', 'd': 'days', 'w': 'weeks'}
_DURATION = re.compile(r'(\d{1,9})([smhdw])')


def parse_duration(text: str) -> timedelta:
    """Return the length of time that `text` says.

    Raises:
        typer.BadParameter: it is no number with a unit.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f'{text!r} is no length of time; give a whole number and s, m, h, d or w, such as 30d')
    number, unit = match.groups()
    try:
        return timedelta(**{_UNITS[unit]: int(number)})
    except OverflowError as error:
        raise typer.BadParameter(f'{text!r} is longer than can be told') from error
