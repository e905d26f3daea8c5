"""JSON inside other text: where a value ends, and what it says. Both take any text and stay linear."""

import json
import math
import re
from typing import Any, NoReturn

_DEEPEST = 100
"""Levels of nesting; what is deeper is no call. Python's encoder gives up at about a thousand."""

# From one bracket or string to the next. Outside strings only what JSON can have there goes on: prose ends the
# value at once, and so does what calls are wrapped in.
_LEAP = re.compile(
    r"""[\s\d:,+\-.truefalsnE]*+
    (?: "[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+(?P<quote>")?
      | (?P<opening>[{\[])
      | (?P<closing>[}\]]) )""",
    re.VERBOSE,
)


def value_end(text: str, begin: int) -> tuple[int, bool]:
    """Return where the object or list that begins at `begin` ends, and whether it is closed there.

    One that is not closed ends where it stops to be JSON. Brackets and strings are minded, nothing else is checked.
    """
    depth, position = 0, begin
    while leap := _LEAP.match(text, position):
        position = leap.end()
        if leap['opening']:
            depth += 1
        elif leap['closing']:
            depth -= 1
        elif not leap['quote']:
            return position, False
        if depth <= 0 or depth > _DEEPEST:
            return position, depth == 0
    # Some way into what is no JSON, so that a caller who goes on from here does not read it again.
    return position, False


def read_json(text: str) -> Any:
    """Return the value that `text` is.

    Raises:
        ValueError: it is no JSON, nested too deeply, or holds what cannot be written again (NaN, half a character).
    """
    try:
        value = _DECODER.decode(text)
        if '\\u' in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError('the value is nested too deeply') from None
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f'{name} is no JSON')


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f'{number[:20]} is out of range')
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
