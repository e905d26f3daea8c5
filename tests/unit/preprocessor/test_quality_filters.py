"""Each quality filter, by examples: what it leaves out, under which reason, and what it lets stay."""

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
    """Return a row: texts take turns, the user begins; messages stay as they are."""
    roles = ('user', 'assistant')
    given = [{'role': roles[i % 2], 'content': turn} if isinstance(turn, str) else turn for i, turn in enumerate(turns)]
    return {'messages': given}


def reason(quality: QualityFilter, row: dict[str, Any]) -> str | None:
    """Return why a filter leaves a row out."""
    drop = quality.judge(row)
    return None if drop is None else drop.reason


def asks(call: dict[str, Any] = CALL, **more: Any) -> dict[str, Any]:
    """Return a message that calls a tool."""
    return {'role': 'assistant', 'content': '', 'tool_calls': [call], **more}


def answers(call_id: str | None = 'c1') -> dict[str, Any]:
    """Return a tool's result."""
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
def test_hard_limits_hold(options: dict[str, Any], row: dict[str, Any], expected: str | None) -> None:
    """Counts, lengths and undecoded text are measured; the bounds themselves are allowed."""
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
        (('q', asks(), answers(), {'role': 'assistant', 'content': 'two'}), None),
        (('q', asks(), answers(None), {'role': 'assistant', 'content': 'two'}), None),
        (('q', asks(), {**answers(), 'content': ''}, {'role': 'assistant', 'content': 'nothing'}), None),
        (('q', asks()), 'call_without_result'),
        (('q', asks(), {'role': 'user', 'content': 'well?'}), 'call_without_result'),
        (('q', asks(), answers('c2')), 'result_without_call'),
        (('q', asks(), answers(), answers()), 'result_without_call'),
        (('q', asks(), answers(), asks(), answers()), 'repeated_call_id'),
        (('q', asks({'function': {'arguments': '{}'}})), 'call_without_name'),
        (('q', asks({'function': {'name': 'f', 'arguments': '[1]'}})), 'bad_arguments'),
        (('q', asks({'function': {'name': 'f', 'arguments': '{'}})), 'bad_arguments'),
        (({'role': 'user', 'content': 'q', 'tool_calls': [CALL]},), 'call_of_another_role'),
    ],
)
def test_chats_have_to_make_sense(turns: tuple[Any, ...], expected: str | None) -> None:
    """Roles, order, empty messages, and calls with their results are checked."""
    assert reason(MessageSanityFilter(), chat(*turns)) == expected


def test_the_end_of_a_chat_can_be_asked_for() -> None:
    """Training ends with an answer, sampling with a question, and a call may be what is to be learnt."""
    assert reason(MessageSanityFilter(ends_with='assistant'), chat('q')) == 'wrong_end'
    assert reason(MessageSanityFilter(ends_with='user'), chat('q')) is None
    assert reason(MessageSanityFilter(is_final_call_allowed=True), chat('q', asks())) is None
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
def test_refusals_are_known_by_their_beginning(answer: str) -> None:
    """In English and Chinese, with typographic quotes, and behind a thought."""
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
def test_answers_that_report_or_quote_are_no_refusals(answer: str) -> None:
    """A failure that is reported, an apology, and a refusal that is quoted stay."""
    assert reason(RefuseFilter(), chat('q', answer)) is None


def test_refusals_of_your_own_words_are_found_in_the_turns_asked_for() -> None:
    """More beginnings can be given, and earlier turns forgiven."""
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
def test_loops_within_a_text_are_found(answer: str, expected: str | None) -> None:
    """Units that repeat often and long enough, at the end or before it, and lines that are most of a text."""
    assert reason(DeadLoopFilter(), chat('q', answer)) == expected
    assert reason(DeadLoopFilter(), chat(answer, 'a')) is None


def test_turns_that_say_the_same_are_a_loop() -> None:
    """The same call over and over is one; a few polls are not."""
    polls = [message for _ in range(5) for message in (asks(), answers())]
    assert reason(DeadLoopFilter(), chat('q', *polls)) == 'repeated_turns'
    assert reason(DeadLoopFilter(max_equal_turns=5), chat('q', *polls)) is None


def test_dialects_become_messages() -> None:
    """ShareGPT's columns, fields and roles, and the older way to call a function."""
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
def test_what_is_no_chat_cannot_be_normalised(row: dict[str, Any]) -> None:
    """The error names the field."""
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
    """Nothing is built from bounds that cannot hold."""
    with pytest.raises(InvalidArguments):
        build_filter(name, init_args)


def test_whole_numbers_are_taken_for_fractions() -> None:
    """A share of 1.0 arrives over the wire as 1."""
    assert isinstance(build_filter('DeadLoopFilter', {'max_line_share': 1}), DeadLoopFilter)
