r"""How answers to problems of mathematics are marked in text: `\boxed{...}`."""

import re

_TOKEN = re.compile(r'(\\f?boxed\s*\{|\{)|\\[\s\S]|\}')
"""What opens a box or another pair of braces, a backslash with what it escapes, or a brace that closes."""


def boxed_answers(text: str) -> list[str]:
    r"""Return what each `\boxed{...}` encloses, in their order, without the space around it.

    One within another is part of the other's answer; an unclosed one is none. Braces that a backslash escapes are
    text. Linear in the text's length.
    """
    places: list[tuple[int, int, int]] = []
    open_at: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        if token[1]:
            open_at.append(token.span() if 'boxed' in token[1] else None)
        elif token[0] == '}' and open_at and (opened := open_at.pop()):
            places.append((*opened, token.start()))
    found: list[str] = []
    last_end = 0
    for mark, start, end in sorted(places):
        if mark >= last_end:
            found.append(text[start:end].strip())
            last_end = end
    return found
