"""Reads what clients put into the query of a URL, and into its path."""

from collections.abc import Mapping
from urllib.parse import parse_qsl

from services.gateway.http.call import HttpCall
from services.gateway.paging import Slice
from services.gateway.tinker.paths import WeightsPath, parse_path
from services.kit.errors import InvalidField

MAX_LIMIT = 1000
_MAX_OFFSET = (1 << 53) - 1
_SCOPES = ('owned', 'accessible')


def query_of(call: HttpCall) -> Mapping[str, str]:
    """Return the query's fields; of one that is given twice, the last."""
    return dict(parse_qsl(bytes(call.scope.get('query_string', b'')).decode('latin-1'), keep_blank_values=True))


def slice_of(query: Mapping[str, str], *, limit: int) -> Slice:
    """Return which part of a list is asked for.

    Raises:
        InvalidField: a number is none, or out of bounds.
    """
    return Slice(
        _whole(query, 'offset', default=0, least=0, most=_MAX_OFFSET),
        _whole(query, 'limit', default=limit, least=1, most=MAX_LIMIT),
    )


def check_scope(query: Mapping[str, str]) -> None:
    """Check whose things are asked for. What a tenant has, all its keys may see, so that both scopes are one.

    Raises:
        InvalidField: it is neither scope.
    """
    if query.get('access_scope', 'owned') not in _SCOPES:
        raise InvalidField('access_scope', f'must be one of {", ".join(_SCOPES)}')


def path_of(call: HttpCall) -> WeightsPath:
    """Return the saved weights that a URL names as run, kind and name.

    Raises:
        InvalidField: there can be none of that name.
    """
    values = call.path_values
    return parse_path(f'tinker://{values["run_id"]}/{values["kind"]}/{values["name"]}', 'path')


def _whole(query: Mapping[str, str], name: str, *, default: int, least: int, most: int) -> int:
    text = query.get(name, str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= 16
    if not is_number or not least <= int(text) <= most:
        raise InvalidField(name, f'must be an integer, {least} to {most}')
    return int(text)
