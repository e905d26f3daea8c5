"""Preprocessor for the countdown game: write an equation of given numbers that equals a target."""

from typing import Any, cast

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.base import Row, RowPreprocessor, chat_of
from twinkle.preprocessor.errors import InvalidRow

_QUESTION = (
    'Using the numbers {nums}, write an equation that equals {target}. Use + - * / and each number exactly once. '
    'Think first within <think> </think>, then give only the equation within <answer> </answer>, '
    'for example <answer>(1 + 2) / 3</answer>.'
)


class CountdownProcessor(RowPreprocessor):
    """Converts `target` (or `response`) and `nums` to a prompt; `user_data` contains both for the reward."""

    def convert(self, row: Row) -> Row:
        """Return the prompt of one game.

        Raises:
            InvalidRow: the target is not an integer, or `nums` is empty or not a list.
        """
        target, nums = row.get('target', row.get('response')), row.get('nums')
        if not isinstance(target, int):
            raise InvalidRow('target', f'must be an integer, got {type(target).__name__}')
        if not isinstance(nums, list) or not nums:
            raise InvalidRow('nums', 'must be a non-empty list of numbers')
        return {
            'messages': chat_of(user=_QUESTION.format(nums=cast('list[Any]', nums), target=target)),
            'user_data': pack_user_data({'target': target, 'nums': nums}),
        }
