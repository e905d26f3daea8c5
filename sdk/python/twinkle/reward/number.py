"""Numbers as people write them, read exactly."""

import re
from fractions import Fraction

_NUMBER = re.compile(r'([+-]?)(\d+|\d{1,3}(?:,\d{3})+)?(?:\.(\d*))?(?:/(\d+))?')
_CURRENCY = re.compile(r'^(?:\\?\$)+|(?:\\?\$)+$')
"""Dollars around a number: of a price, escaped as LaTeX wants it, or of a formula."""
_LONGEST = 64
"""Characters of a number; longer ones are no answers."""


def read_number(text: str) -> Fraction | None:
    r"""Return the number that `text` is, such as '-1,200.50', '$3', '\$3', '3/4' or '12.'; None where it is none.

    It has no exponents, since a few digits of one make a number that fills the memory.
    """
    trimmed = text.strip()
    bare = _CURRENCY.sub('', trimmed).strip().removesuffix('.') if len(trimmed) <= _LONGEST else ''
    match = _NUMBER.fullmatch(bare)
    if match is None or not (match[2] or match[3]):
        return None
    whole, decimals, divisor = (match[2] or '0').replace(',', ''), match[3] or '', match[4]
    if not bare.isascii() or (divisor is not None and not int(divisor)):
        return None
    value = Fraction(int(whole + decimals), 10 ** len(decimals)) / int(divisor or 1)
    return -value if match[1] == '-' else value
