"""Durations and times on the command line: `30d`, `12h`, `90s`; local time in output."""

import re
from datetime import UTC, timedelta

import typer
from google.protobuf.timestamp_pb2 import Timestamp

_UNITS = {'s': 'seconds', 'm': 'minutes', 'h': 'hours', 'd': 'days', 'w': 'weeks'}
_DURATION = re.compile(r'(\d{1,9})([smhdw])')


def parse_duration(text: str) -> timedelta:
    """Parse a duration such as `30d`.

    Raises:
        typer.BadParameter: `text` is not a whole number with a unit, or is too large.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f'{text!r} is not a duration; use a whole number and s, m, h, d or w, such as 30d')
    number, unit = match.groups()
    try:
        return timedelta(**{_UNITS[unit]: int(number)})
    except OverflowError as error:
        raise typer.BadParameter(f'{text!r} is too long') from error


def local_text(moment: Timestamp) -> str:
    """Return a time in the local time zone, to the minute; empty if it is not set."""
    if not moment.seconds:
        return ''
    return moment.ToDatetime(UTC).astimezone().strftime('%Y-%m-%d %H:%M')
