"""Filter for refusals in English and Chinese."""

import re
from collections.abc import Sequence
from typing import Literal

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.quality.base import Drop, QualityFilter
from twinkle.preprocessor.quality.chat import COLUMN, content_of, messages_of

_HEAD = 400
"""Number of characters at the beginning of an answer that are searched for a refusal."""
_THOUGHT_END = '</think>'
_QUOTES = str.maketrans({'\u2019': "'", '\u2018': "'", '\u02bc': "'"})
_SORRY = r"(?:(?:i'm|i am|we're|we are) )?(?:(?:so|very|really|truly|deeply) )?(?:sorry|apologi[sz]e|afraid)"
_PREFACE = rf'(?:unfortunately|{_SORRY}|i {_SORRY}|my apologies|as an? (?:ai|artificial|large|language)[^.,!?]{{0,60}})'
_UNABLE = r"(?:i|we)(?:'m| am|'re| are)? (?:cannot|can't|can not|won't|will not|must decline to|(?:not able|unable) to)"
_HELP_VERBS = r'(?:assist|help|comply|fulfil|fulfill|provide|engage|participate|discuss|do that|respond to)(?! but\b)'
_ACTION_VERBS = (
    rf'(?:{_HELP_VERBS}|support|create|generate|write|answer|offer|share|give|continue with'
    r'|complete (?:this|that|your))'
)
"""Verbs of a refusal after an apology. Without an apology, only `_HELP_VERBS` indicate a refusal, because 'I will not
write ...' may be a plan."""
_CHINESE = (
    r'(?:(?:非常|很|十分)?(?:抱歉|对不起|遗憾|不好意思)\W{0,2})?(?:但是?|不过)?(?:作为\w{0,30}\W)?'
    r'我(?:们)?(?:无法|不能|没法|没有?办法|不会|不可以)(?:为您|为你|给您|给你|向您|向你)?'
    r'(?:提供|协助|帮助|帮|回答|满足|完成|讨论|继续|生成|参与|支持)'
)
_REFUSALS = tuple(
    re.compile(pattern)
    for pattern in (
        rf'(?:{_PREFACE}[,.!:;]? ?(?:but )?){{1,2}}{_UNABLE} (?:be able to )?{_ACTION_VERBS}\b',
        rf'{_UNABLE} (?:be able to )?{_HELP_VERBS}\b',
        rf'(?:{_PREFACE}[,.!]? ?)?(?:but )?i (?:have to|must) (?:decline|refuse)\b',
        _CHINESE,
    )
)


class RefuseFilter(QualityFilter):
    """Removes chats in which the assistant refuses to answer.

    An answer is a refusal if it begins (after its thought) with a phrase such as 'I'm sorry, but I can't help ...', in
    English or Chinese. Answers that only report a failure ('I cannot find the file') are kept.
    """

    def __init__(self, *, turns: Literal['any', 'last'] = 'any', phrases: Sequence[str] = ()) -> None:
        """Set the checked answers and additional phrases.

        Args:
            turns: 'any' checks all answers, 'last' only the last answer. Default: 'any'.
            phrases: additional beginnings of refusals, case-insensitive. Default: none.

        Raises:
            InvalidArguments: `turns` is neither 'any' nor 'last', `phrases` is a string, or a phrase is empty.
        """
        if turns not in {'any', 'last'}:
            raise InvalidArguments(f"turns must be 'any' or 'last', got {turns!r}")
        if isinstance(phrases, str) or not all(phrase.strip() for phrase in phrases):
            raise InvalidArguments('phrases must be a list of non-empty strings')
        self.turns: Literal['any', 'last'] = turns
        self.phrases = list(phrases)
        self._beginnings = tuple(_plain(phrase) for phrase in phrases)

    def drop_of(self, row: Row) -> Drop | None:
        """Return a `Drop` for the first answer that is a refusal, or None."""
        answers = [
            (index, content_of(message, index))
            for index, message in enumerate(messages_of(row))
            if message['role'] == 'assistant'
        ]
        for index, answer in answers if self.turns == 'any' else answers[-1:]:
            head = _plain(_without_thought(answer)[:_HEAD])
            if head.startswith(self._beginnings) or any(pattern.match(head) for pattern in _REFUSALS):
                return Drop('refusal', f'{COLUMN}[{index}] begins with {head[:60]!r}')
        return None


def _without_thought(answer: str) -> str:
    if not answer.lstrip().startswith('<think>'):
        return answer.lstrip()
    _, end, rest = answer.partition(_THOUGHT_END)
    return rest.lstrip() if end else ''


def _plain(text: str) -> str:
    return ' '.join(text.translate(_QUOTES).casefold().split())
