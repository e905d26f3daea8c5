"""Preprocessors convert rows to chats, and errors name the invalid row and column."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from twinkle.data_format import user_data_get
from twinkle.preprocessor import (
    AlpacaProcessor,
    InvalidArguments,
    InvalidRow,
    Preprocessor,
    SelfCognitionProcessor,
    UnknownPreprocessor,
    build_filter,
    build_preprocessor,
    filter_names,
    preprocessor_names,
)

IDENTITY_FILE = Path(__file__).parents[3] / 'examples/data/self_cognition.jsonl'


def converted_row(processor: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a preprocessor for one row."""
    (converted,) = Preprocessor.map_col_to_row(processor(Preprocessor.map_row_to_col([row])))
    return converted


def test_self_cognition_inserts_name_and_author() -> None:
    """The placeholders for name and author are replaced in the question and in the answer."""
    row = {'query': 'Are you {{NAME}}?', 'response': 'Yes, by {{AUTHOR}}.', 'tag': 'en'}
    assert converted_row(SelfCognitionProcessor('Mina', 'Us'), row) == {
        'messages': [{'role': 'user', 'content': 'Are you Mina?'}, {'role': 'assistant', 'content': 'Yes, by Us.'}]
    }


def test_alpaca_joins_instruction_and_input() -> None:
    """A non-empty input follows the instruction on the next line."""
    row = {'instruction': 'Add', 'input': '1 1', 'output': '2'}
    assert converted_row(AlpacaProcessor(), row)['messages'][0]['content'] == 'Add\n1 1'
    assert converted_row(AlpacaProcessor(), {**row, 'input': ''})['messages'][0]['content'] == 'Add'


def test_gsm8k_keeps_the_number_for_the_reward() -> None:
    """The number after #### is the ground truth; the full answer is added only on request."""
    row = {'question': 'q', 'answer': 'so\n#### 1,200'}
    prompt = converted_row(build_preprocessor('GSM8KProcessor'), row)
    assert user_data_get(prompt, 'ground_truth') == '1200'
    assert [message['role'] for message in prompt['messages']] == ['system', 'user']
    with_answer = converted_row(build_preprocessor('GSM8KProcessor', {'add_assistant': True}), row)
    assert with_answer['messages'][-1]['content'] == row['answer']


def test_countdown_and_competition_math_read_their_columns() -> None:
    """Rows of the countdown game and of competition mathematics become chats."""
    game = converted_row(build_preprocessor('CountdownProcessor'), {'target': 24, 'nums': [1, 2, 3, 4]})
    assert (user_data_get(game, 'target'), user_data_get(game, 'nums')) == (24, [1, 2, 3, 4])
    problem = converted_row(build_preprocessor('CompetitionMathProcessor'), {'problem': 'p', 'solution': 's'})
    assert [message['content'] for message in problem['messages']] == ['p', 's']


@pytest.mark.parametrize('row', [{'query': 'q'}, {'query': 'q', 'response': None}, {'query': 'q', 'response': 3}])
def test_unreadable_row_is_named(row: dict[str, Any]) -> None:
    """The error names the row of the batch and the column, even after pickling."""
    good = {'query': 'q', 'response': 'r'}
    with pytest.raises(InvalidRow) as caught:
        SelfCognitionProcessor('a', 'b')(Preprocessor.map_row_to_col([good, row]))
    assert (caught.value.row_index, caught.value.column) == (1, 'response')
    assert pickle.loads(pickle.dumps(caught.value)).row_index == 1


def test_unknown_names_are_refused() -> None:
    """The error of an unknown name lists the registered names."""
    with pytest.raises(UnknownPreprocessor, match='SelfCognitionProcessor'):
        build_preprocessor('Nothing')
    with pytest.raises(UnknownPreprocessor, match='TextLengthFilter'):
        build_filter('Nothing')
    assert 'SelfCognitionProcessor' in preprocessor_names()
    assert 'TextLengthFilter' in filter_names()


@pytest.mark.parametrize('init_args', [{}, {'model_name': 'a'}, {'model_name': 'a', 'model_author': 'b', 'x': 1}])
def test_wrong_arguments_are_refused(init_args: dict[str, Any]) -> None:
    """Missing and unknown arguments are refused before any row is read."""
    with pytest.raises(InvalidArguments):
        build_preprocessor('SelfCognitionProcessor', init_args)


def test_arguments_of_a_wrong_type_are_refused() -> None:
    """An argument whose type differs from its parameter's type is refused."""
    with pytest.raises(InvalidArguments, match='model_name must be str'):
        build_preprocessor('SelfCognitionProcessor', {'model_name': 1, 'model_author': 'b'})


def test_instances_accept_no_arguments() -> None:
    """Arguments are refused if an instance is given."""
    with pytest.raises(InvalidArguments):
        build_preprocessor(AlpacaProcessor(), {'x': 1})


def test_length_filter_measures_one_column() -> None:
    """Only rows whose text in the column has a length within the bounds are kept."""
    keeps = build_filter('TextLengthFilter', {'column': 'text', 'min_characters': 2, 'max_characters': 3})
    assert [keeps({'text': 'x' * length}) for length in range(5)] == [False, False, True, True, False]


def test_identity_questions_are_varied_and_complete() -> None:
    """The example dataset has at least 100 different questions, and every answer has a placeholder."""
    rows = [json.loads(line) for line in IDENTITY_FILE.read_text(encoding='utf-8').splitlines()]
    assert len(rows) >= 100
    assert len({row['query'] for row in rows}) == len(rows)
    with_placeholder = [row for row in rows if '{{NAME}}' in row['response'] or '{{AUTHOR}}' in row['response']]
    assert len(with_placeholder) == len(rows)
    assert all(set(row) == {'query', 'response', 'tag'} for row in rows)
