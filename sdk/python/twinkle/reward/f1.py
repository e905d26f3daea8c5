"""The F1 reward: word overlap of an answer with the expected answer."""

import re
import unicodedata
from collections import Counter
from typing import Any, cast

from twinkle.data_format import boxed_answers
from twinkle.reward.base import AnswerReward
from twinkle.reward.reading import after_thinking, tagged

_ARTICLES = frozenset({'a', 'an', 'the'})
_WORD = re.compile(r'[\u3400-\u9fff]|[^\s\u3400-\u9fff]+')
"""A word delimited by spaces, or a single Chinese character."""


class F1Reward(AnswerReward):
    r"""The F1 score of an answer's words, from 0 to 1. With several ground truths, the best score is used.

    Rajpurkar et al. 2016 (SQuAD, arXiv 1606.05250), section 6.1: harmonic mean of precision and recall over the bags
    of words, ignoring case, punctuation and articles. The answer is the content of the last `<answer>`, else of
    the last `\boxed{...}`, else the text after the thinking.
    """

    def score(self, completion: str, ground_truth: Any) -> float:
        """Return the F1 score of one answer."""
        text = after_thinking(completion)
        answer = tagged(text, 'answer')
        if answer is None:
            answer = (boxed_answers(text) or [text])[-1]
        several = isinstance(ground_truth, list | tuple)
        truths = [str(truth) for truth in (cast('list[Any]', ground_truth) if several else [ground_truth])]
        return max((f1_score(answer, truth) for truth in truths), default=0.0)


def f1_score(answer: str, truth: str) -> float:
    """Return the F1 score of the words of two texts; 1.0 if both have no words."""
    words, expected = _words(answer), _words(truth)
    shared = (words & expected).total()
    if not shared:
        return float(not words and not expected)
    precision, recall = shared / words.total(), shared / expected.total()
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> Counter[str]:
    # Unicode categories P and S cover string.punctuation in all scripts.
    kept = ''.join(character for character in text.lower() if unicodedata.category(character)[0] not in 'PS')
    found = _WORD.findall(kept)
    return Counter(word for word in found if word not in _ARTICLES)
