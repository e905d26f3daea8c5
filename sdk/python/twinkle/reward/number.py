"""Exact parsing of numbers in common notations."""

import re
from fractions import Fraction

_NUMBER = re.compile(r'([+-]?)(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?(?:/(\d+))?')
_CURRENCY = re.compile(r'^(?:\\?\$)+|(?:\\?\$)+$')
"""Dollar signs around a number: a currency sign, possibly escaped for LaTeX, or math delimiters."""
_MAX_CHARS = 64
"""Maximum length of a number."""


def read_number(text: str) -> Fraction | None:
    r"""Parse a number such as '-1,200.50', '$3', '\$3', '3/4' or '12.'; return None if `text` is not a number.

    Exponents are not supported, because a short exponent can produce a number that fills the memory.
    """
    trimmed = text.strip()
    bare = _CURRENCY.sub('', trimmed).strip().removesuffix('.') if len(trimmed) <= _MAX_CHARS else ''
    match = _NUMBER.fullmatch(bare)
    if match is None or not (match[2] or match[3]):
        return None
    whole, decimals, divisor = (match[2] or '0').replace(',', ''), match[3] or '', match[4]
    if not bare.isascii() or (divisor is not None and not int(divisor)):
        return None
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) / int(divisor or 1)
    return -value if match[1] == '-' else value
