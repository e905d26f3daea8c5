"""How many words an answer shares with the expected one."""

import re
import unicodedata
from collections import Counter
from typing import Any, cast

from twinkle.data_format import boxed_answers
from twinkle.reward.base import AnswerReward
from twinkle.reward.reading import after_thinking, tagged

_ARTICLES = frozenset({'a', 'an', 'the'})
_WORD = re.compile(r'[\u3400-\u9fff]|[^\s\u3400-\u9fff]+')
"""A word between spaces; in Chinese, which has none, a character."""


class F1Reward(AnswerReward):
    r"""The F1 score of an answer's words, from 0 to 1; of several ground truths the best counts.

    Rajpurkar et al. 2016 (SQuAD, arXiv 1606.05250), section 6.1: harmonic mean of precision and recall over the bags
    of words, without case, punctuation and articles. The answer is what `<answer>` encloses, or the last `\boxed{...}`,
    or all that is said behind the thinking.
    """

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return the F1 score of one answer."""
        said = after_thinking(completion)
        answer = tagged(said, 'answer')
        if answer is None:
            answer = (boxed_answers(said) or [said])[-1]
        several = isinstance(ground_truth, list | tuple)
        truths = [str(truth) for truth in (cast('list[Any]', ground_truth) if several else [ground_truth])]
        return max((f1_score(answer, truth) for truth in truths), default=0.0)


def f1_score(answer: str, truth: str) -> float:
    """Return the F1 score of the words of two texts; 1.0 where neither has any."""
    words, expected = _words(answer), _words(truth)
    shared = (words & expected).total()
    if not shared:
        return float(not words and not expected)
    precision, recall = shared / words.total(), shared / expected.total()
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> Counter[str]:
    # Punctuation and symbols (categories P and S), as string.punctuation has them, in every script.
    kept = ''.join(character for character in text.lower() if unicodedata.category(character)[0] not in 'PS')
    found = _WORD.findall(kept)
    return Counter(word for word in found if word not in _ARTICLES)
