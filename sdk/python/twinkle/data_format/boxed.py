r"""Extraction of answers to mathematical problems, which texts mark with `\boxed{...}`."""

import re

_TOKEN = re.compile(r'(\\(?:boxed|fbox)\s*\{|\{)|\\[\s\S]|\}')
"""Matches the opening of a box or of other braces, an escaped character, or a closing brace."""


def boxed_answers(text: str) -> list[str]:
    r"""Return the content of each `\boxed{...}` or `\fbox{...}`, in order, without surrounding whitespace.

    A box inside another box is part of the outer content, and a box that is not closed is ignored. Escaped braces are
    text. The time is linear in the length of the text.
    """
    spans: list[tuple[int, int, int]] = []
    open_at: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        if token[1]:
            open_at.append(token.span() if 'box' in token[1] else None)
        elif token[0] == '}' and open_at and (opened := open_at.pop()):
            spans.append((*opened, token.start()))
    found: list[str] = []
    last_end = 0
    for mark, start, end in sorted(spans):
        if mark >= last_end:
            found.append(text[start:end].strip())
            last_end = end
    return found
