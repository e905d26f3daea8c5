"""Find the end of a JSON value inside other text, and parse the value. Any text is accepted, in linear time."""

import json
import math
import re
from typing import Any, NoReturn

_MAX_DEPTH = 100
"""Maximum nesting depth of a call's JSON. Python's JSON encoder fails at a depth of about 1000."""

# Matches up to and including the next bracket or string. Outside strings it accepts only characters that JSON allows
# there, so prose and the delimiters around calls end the value.
_STEP = re.compile(
    r"""[\s\d:,+\-.truefalsnE]*+
    (?: "[^"\\\x00-\x1f]*+(?:\\.[^"\\\x00-\x1f]*+)*+(?P<quote>")?
      | (?P<opening>[{\[])
      | (?P<closing>[}\]]) )""",
    re.VERBOSE,
)

# Matches what may follow the last bracket or string of a value that is still incomplete.
_INCOMPLETE = re.compile(r'[\s\d:,+\-.truefalsnE]*+\\?')


def value_end(text: str, begin: int) -> tuple[int, bool]:
    """Return the end of the object or list that begins at `begin`, and whether it is closed there.

    An unclosed value ends at the first character that cannot be JSON. Only brackets and strings are checked.
    """
    depth, position = 0, begin
    while step := _STEP.match(text, position):
        position = step.end()
        if step['opening']:
            depth += 1
        elif step['closing']:
            depth -= 1
        elif not step['quote']:
            return position, False
        if depth <= 0 or depth > _MAX_DEPTH:
            return position, depth == 0
    # The position is inside the invalid part, so a caller that continues from here does not read it again.
    return position, False


def may_grow(text: str, end: int) -> bool:
    """Return whether more text may close a value whose unclosed end is `end`, as `value_end` returns it."""
    return _INCOMPLETE.fullmatch(text, end) is not None


def read_json(text: str) -> Any:
    """Return the parsed value of `text`.

    Raises:
        ValueError: the text is not JSON, is nested too deeply, or contains values that cannot be written back (NaN,
            infinity or a lone surrogate).
    """
    try:
        value = _DECODER.decode(text)
        if '\\u' in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError('the value is nested too deeply') from None
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f'{name} is not valid JSON')


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f'{number[:20]} is out of range')
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
