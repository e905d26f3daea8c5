"""The countdown game: reach a number with four others."""

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
    """Reads `target` and `nums`; gives `messages` and both again in `user_data`, for the reward."""

    def convert(self, row: Row) -> Row:
        """Return one game."""
        target, nums = row.get('target', row.get('response')), row.get('nums')
        if not isinstance(target, int):
            raise InvalidRow('target', f'must be an integer, got {type(target).__name__}')
        if not isinstance(nums, list) or not nums:
            raise InvalidRow('nums', 'must be a list of numbers')
        return {
            'messages': chat_of(user=_QUESTION.format(nums=cast('list[Any]', nums), target=target)),
            'user_data': pack_user_data({'target': target, 'nums': nums}),
        }
