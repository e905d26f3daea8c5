"""Examples for each quality filter: removed rows with their reasons, and kept rows."""

from typing import Any

import pytest

from twinkle.preprocessor import (
    DeadLoopFilter,
    HardFilter,
    InvalidArguments,
    InvalidRow,
    MessageNormalizer,
    MessageSanityFilter,
    QualityFilter,
    RefuseFilter,
    build_filter,
)

Chat = list[dict[str, Any]]
CALL = {'id': 'c1', 'type': 'function', 'function': {'name': 'add', 'arguments': '{"a": 1}'}}


def chat(*turns: Any) -> dict[str, Any]:
    """Return a row with a chat. Texts alternate between user and assistant; messages are used unchanged."""
    roles = ('user', 'assistant')
    chat_messages = [
        {'role': roles[i % 2], 'content': turn} if isinstance(turn, str) else turn for i, turn in enumerate(turns)
    ]
    return {'messages': chat_messages}


def reason(quality: QualityFilter, row: dict[str, Any]) -> str | None:
    """Return the reason why a filter removes a row, or None."""
    drop = quality.judge(row)
    return None if drop is None else drop.reason


def call_message(call: dict[str, Any] = CALL, **more: Any) -> dict[str, Any]:
    """Return a message with a tool call."""
    return {'role': 'assistant', 'content': '', 'tool_calls': [call], **more}


def result_message(call_id: str | None = 'c1') -> dict[str, Any]:
    """Return the message of a tool result."""
    return {'role': 'tool', 'content': '2', 'tool_call_id': call_id}


@pytest.mark.parametrize(
    ('options', 'row', 'expected'),
    [
        ({}, chat('hello', 'hi'), None),
        ({}, chat(), 'too_few_messages'),
        ({'max_messages': 1}, chat('a', 'b'), 'too_many_messages'),
        ({}, chat('', ''), 'too_short'),
        ({'min_characters': 8}, chat('hello', 'hi'), 'too_short'),
        ({'max_characters': 6}, chat('hello', 'hi'), 'too_long'),
        ({}, chat('caf\ufffd', 'hi'), 'broken_text'),
        ({'max_broken_share': 0.5}, chat('caf\ufffd', 'hi'), None),
        ({}, chat('a\tb\n', 'c\r\n'), None),
    ],
)
def test_hard_filter_checks_limits(options: dict[str, Any], row: dict[str, Any], expected: str | None) -> None:
    """Counts, lengths and undecodable text are checked. Values equal to a bound are accepted."""
    assert reason(HardFilter(**options), row) == expected


SYSTEM = {'role': 'system', 'content': 's'}


@pytest.mark.parametrize(
    ('turns', 'expected'),
    [
        ((SYSTEM, {'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a'}), None),
        (('q', 'a', SYSTEM), 'late_system'),
        (('q', {'role': 'robot', 'content': 'a'}), 'unknown_role'),
        (({'role': 'assistant', 'content': 'a'}, 'b'), 'no_user_first'),
        ((SYSTEM,), 'no_user_first'),
        ((), 'no_messages'),
        (('q', ' \n'), 'empty_message'),
        (('q', {'role': 'assistant', 'content': '', 'reasoning_content': 'hm'}), 'empty_message'),
        (('q', call_message(), result_message(), {'role': 'assistant', 'content': 'two'}), None),
        (('q', call_message(), result_message(None), {'role': 'assistant', 'content': 'two'}), None),
        (('q', call_message(), {**result_message(), 'content': ''}, {'role': 'assistant', 'content': 'nothing'}), None),
        (('q', call_message()), 'call_without_result'),
        (('q', call_message(), {'role': 'user', 'content': 'well?'}), 'call_without_result'),
        (('q', call_message(), result_message('c2')), 'result_without_call'),
        (('q', call_message(), result_message(), result_message()), 'result_without_call'),
        (('q', call_message(), result_message(), call_message(), result_message()), 'repeated_call_id'),
        (('q', call_message({'function': {'arguments': '{}'}})), 'call_without_name'),
        (('q', call_message({'function': {'name': 'f', 'arguments': '[1]'}})), 'bad_arguments'),
        (('q', call_message({'function': {'name': 'f', 'arguments': '{'}})), 'bad_arguments'),
        (({'role': 'user', 'content': 'q', 'tool_calls': [CALL]},), 'call_of_another_role'),
    ],
)
def test_message_sanity_filter_checks_chats(turns: tuple[Any, ...], expected: str | None) -> None:
    """Roles, order, empty messages, and tool calls with their results are checked."""
    assert reason(MessageSanityFilter(), chat(*turns)) == expected


def test_the_end_of_a_chat_can_be_required() -> None:
    """The role of the last message can be required, and a final tool call can be allowed."""
    assert reason(MessageSanityFilter(ends_with='assistant'), chat('q')) == 'wrong_end'
    assert reason(MessageSanityFilter(ends_with='user'), chat('q')) is None
    assert reason(MessageSanityFilter(is_final_call_allowed=True), chat('q', call_message())) is None
    with pytest.raises(InvalidArguments):
        MessageSanityFilter(ends_with='tool')  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    'answer',
    [
        "I'm sorry, but I can't help with that.",
        'I\u2019m sorry, but I can\u2019t assist with that request.',
        'As an AI language model, I cannot provide medical advice.',
        'Unfortunately, I am unable to fulfill this request.',
        '<think>\nRisky.\n</think>\n\nI cannot assist with that.',
        'I must decline to help.',
        "I'm sorry, but as an AI model, I can't write that.",
        "Sorry, I won't write that.",
        '抱歉\uff0c我无法提供这些信息。',
        '作为人工智能助手\uff0c我不能回答这个问题。',
    ],
)
def test_refusals_are_found_by_their_first_words(answer: str) -> None:
    """Refusals are found in English and Chinese, with typographic quotes and after a thought."""
    assert reason(RefuseFilter(), chat('q', answer)) == 'refusal'


@pytest.mark.parametrize(
    'answer',
    [
        'I cannot find the file you named; shall I create it?',
        'Sorry for the delay. The answer is 4.',
        'I cannot help but admire this proof.',
        'I will not write the file yet; first I read it.',
        'A polite refusal reads: I cannot help with that.',
        '<think>I cannot help with that? I can.</think>Here you are.',
        '我不能确定\uff0c但答案可能是 4。',
    ],
)
def test_other_answers_are_not_refusals(answer: str) -> None:
    """Reported failures, apologies and quoted refusals are kept."""
    assert reason(RefuseFilter(), chat('q', answer)) is None


def test_phrases_and_turns_can_be_chosen() -> None:
    """Additional phrases can be given, and the check can be limited to the last answer."""
    row = chat('q', 'No can do, friend.', 'please', 'Here you are.')
    assert reason(RefuseFilter(phrases=['no CAN do']), row) == 'refusal'
    assert reason(RefuseFilter(turns='last', phrases=['no can do']), row) is None
    assert reason(RefuseFilter(), row) is None


@pytest.mark.parametrize(
    ('answer', 'expected'),
    [
        ('Let me check. ' * 40, 'repeated_text'),
        ('A fine beginning. ' + 'wait, ' * 90 + 'so the answer is 4.', 'repeated_text'),
        ('x' * 400, 'repeated_text'),
        ('a paragraph of some length that comes again and again, word by word and in full. ' * 9, 'repeated_text'),
        ('x' * 399, None),
        ('Let me check. ' * 7, None),
        (''.join(f'Step {i}: add {i}.\n' for i in range(200)), None),
        (''.join(f'{i}.\nI should think about this once more.\n' for i in range(20)), None),
        (''.join(f'I should think about this once more.\n{i if i % 3 else ""}\n' for i in range(20)), 'repeated_text'),
    ],
)
def test_repetitions_within_a_text_are_found(answer: str, expected: str | None) -> None:
    """Units that repeat often enough and long enough are found, and so are lines that make up most of a text."""
    assert reason(DeadLoopFilter(), chat('q', answer)) == expected
    assert reason(DeadLoopFilter(), chat(answer, 'a')) is None


def test_equal_turns_are_a_repetition() -> None:
    """More than `max_equal_turns` equal calls are a repetition."""
    polls = [message for _ in range(5) for message in (call_message(), result_message())]
    assert reason(DeadLoopFilter(), chat('q', *polls)) == 'repeated_turns'
    assert reason(DeadLoopFilter(max_equal_turns=5), chat('q', *polls)) is None


def test_other_chat_formats_become_messages() -> None:
    """ShareGPT columns, fields and roles, and the older format of function calls, are converted."""
    row = {
        'id': 7,
        'conversations': [
            {'from': 'human', 'value': ' hello\r\n', 'weight': None},
            {'from': 'gpt', 'value': None, 'function_call': {'name': 'f', 'arguments': '{}'}},
            {'from': 'observation', 'value': '2'},
        ],
    }
    call = {'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
    assert MessageNormalizer().convert(row) == {
        'messages': [
            {'role': 'user', 'content': 'hello'},
            {'role': 'assistant', 'content': '', 'tool_calls': [call]},
            {'role': 'tool', 'content': '2'},
        ],
        'id': 7,
    }


@pytest.mark.parametrize('row', [{}, {'messages': 'hi'}, {'messages': ['hi']}, {'messages': [{'content': 'hi'}]}])
def test_invalid_chats_cannot_be_normalized(row: dict[str, Any]) -> None:
    """A row without a valid chat raises an InvalidRow."""
    with pytest.raises(InvalidRow):
        MessageNormalizer().convert(row)


@pytest.mark.parametrize(
    ('name', 'init_args'),
    [
        ('HardFilter', {'min_messages': 5, 'max_messages': 4}),
        ('HardFilter', {'max_broken_share': 2}),
        ('HardFilter', {'min_messages': True}),
        ('DeadLoopFilter', {'min_repeats': 1}),
        ('DeadLoopFilter', {'max_line_share': 0}),
        ('RefuseFilter', {'phrases': ['']}),
        ('RefuseFilter', {'phrases': 'no'}),
        ('RefuseFilter', {'phrases': [1]}),
        ('RefuseFilter', {'turns': 'first'}),
        ('DedupFilter', {'threshold': 0}),
        ('DedupFilter', {'columns': []}),
        ('DedupFilter', {'memory': 0}),
        ('DedupFilter', {'threshold': '0.9'}),
    ],
)
def test_arguments_out_of_range_are_refused(name: str, init_args: dict[str, Any]) -> None:
    """Arguments that are out of range or of the wrong type are refused."""
    with pytest.raises(InvalidArguments):
        build_filter(name, init_args)


def test_integers_are_accepted_as_floats() -> None:
    """An integer is accepted for a float, because JSON may encode 1.0 as 1."""
    assert isinstance(build_filter('DeadLoopFilter', {'max_line_share': 1}), DeadLoopFilter)
