"""Common formats of rows: each gives the expected chats, texts and labels, and other rows are refused."""

import csv
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fixtures.row_formats import BLUE, CHAT, FORMATS, GREEN, OPENING, SKY, SYSTEM
from twinkle.data_format import user_data_get
from twinkle.dataset import Dataset, DatasetError, DatasetMeta, InvalidExample, IterableDataset, LazyDataset
from twinkle.preprocessor import InvalidArguments, InvalidRow

ROWS = pytest.mark.parametrize(('name', 'row', 'examples'), FORMATS.values(), ids=FORMATS)


def opened(meta: DatasetMeta, folder: Path, kind: type[Any] = Dataset) -> Any:
    """Return a dataset with the tiny tokenizer."""
    dataset = kind(meta)
    dataset.set_template('Template', model_id=str(folder))
    return dataset


def shown(dataset: Any, row: Mapping[str, Any]) -> tuple[list[Any], str, str]:
    """Return the messages, the text and the labelled text of an encoded row."""
    ids, labels = np.asarray(row['input_ids']), np.asarray(row['labels'])
    positions = np.flatnonzero(labels >= 0)
    # A label is the next token, and labelled tokens are consecutive in these examples.
    assert np.array_equal(labels[positions], ids[positions + 1])
    assert not positions.size or np.array_equal(positions, np.arange(positions[0], positions[-1] + 1))
    return list(row['messages']), dataset.template.decode(ids), dataset.template.decode(labels[positions])


@ROWS
def test_format_is_recognized_and_encoded(
    name: str, row: dict[str, Any], examples: list[Any], tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of each format give the exact messages, text and labels; one log line names the format."""
    dataset = opened(DatasetMeta(data=[row, row]), tiny_llama_dir)
    with caplog.at_level(logging.WARNING):
        report = dataset.encode()
    assert [shown(dataset, encoded) for encoded in dataset] == examples * 2
    named = [line for line in report if line.startswith('rows are read as ')]
    assert [line.split()[4].strip(',') for line in named] == ([] if name == 'messages' else [name])
    assert sum(record.getMessage() in named for record in caplog.records) == len(named)
    again = opened(DatasetMeta(data=[row, row]), tiny_llama_dir)
    again.encode(format=name)
    assert [shown(again, encoded) for encoded in again] == examples * 2


@ROWS
def test_rows_of_files_give_the_same_examples(
    name: str, row: dict[str, Any], examples: list[Any], tmp_path: Path, tiny_llama_dir: Path
) -> None:
    """Each format in a file of JSON lines, whose rows are a table, is encoded without another call."""
    path = tmp_path / 'rows.jsonl'
    path.write_text(2 * (json.dumps(row) + '\n'))
    dataset = opened(DatasetMeta(str(path)), tiny_llama_dir)
    report = dataset.encode()
    assert [shown(dataset, encoded) for encoded in dataset] == examples * 2
    assert any(name in line for line in report) == (name != 'messages')


@ROWS
def test_lazy_datasets_and_streams_give_the_same_features(
    name: str, row: dict[str, Any], examples: list[Any], tiny_llama_dir: Path
) -> None:
    """A stream gives the same features as a dataset in memory. A lazy dataset does so too, except for pairs."""
    del examples
    for kind in (IterableDataset, LazyDataset):
        dataset = opened(DatasetMeta(data=[row, row]), tiny_llama_dir, kind)
        dataset.encode()
        if kind is LazyDataset and name == 'preference':
            with pytest.raises(InvalidExample, match='is a pair of two chats, but a LazyDataset needs one'):
                dataset[0]
            continue
        expected = opened(DatasetMeta(data=[row, row]), tiny_llama_dir)
        expected.encode()
        assert [shown(dataset, found) for found in dataset] == [shown(expected, found) for found in expected]


@pytest.mark.parametrize(
    ('row', 'prompt'),
    [
        ({'text': 'The sky is'}, 'The sky is'),
        ({'prompt': 'The sky is'}, 'The sky is'),
        ({'prompt': [SKY]}, OPENING),
        ({'prompt': 'The sky is', 'completion': ' blue.'}, 'The sky is'),
        ({'prompt': [SKY], 'completion': [BLUE]}, OPENING),
        ({'prompt': [SKY], 'completion': [BLUE], 'label': True}, OPENING),
        ({'chosen': [SKY, BLUE], 'rejected': [SKY, GREEN]}, OPENING),
        ({'instruction': 'Sky?', 'output': 'Blue.'}, OPENING),
        ({'prompt': [SKY], 'answer': 'blue'}, OPENING),
    ],
)
def test_prompts_for_sampling_have_no_completion(row: dict[str, Any], prompt: str, tiny_llama_dir: Path) -> None:
    """Each row that is encoded for sampling gives one prompt without the completion."""
    dataset = opened(DatasetMeta(data=[row]), tiny_llama_dir)
    dataset.encode(add_generation_prompt=True)
    (found,) = dataset
    assert dataset.template.decode(found['input_ids']) == prompt
    assert 'labels' not in found


def test_rewards_find_their_inputs(tiny_llama_dir: Path) -> None:
    """A row's answers, preferences, user data and other columns are kept in its examples."""
    rows = [{'question': '1 + 2?', 'answer': '#### 3'}]
    dataset = opened(DatasetMeta(data=rows), tiny_llama_dir)
    dataset.encode(add_generation_prompt=True)
    assert user_data_get(dataset[0], 'ground_truth') == '3'
    pair = {'chosen': [SKY, BLUE], 'rejected': [SKY, GREEN], 'score': 5, 'user_data': [('source', '"web"')]}
    dataset = opened(DatasetMeta(data=[pair]), tiny_llama_dir)
    dataset.encode()
    assert [user_data_get(row, 'preference') for row in dataset] == ['chosen', 'rejected']
    assert [(user_data_get(row, 'source'), row['score']) for row in dataset] == [('web', 5)] * 2
    assert 'chosen' not in dataset.columns


@pytest.mark.parametrize(
    ('rows', 'error', 'problem'),
    [
        (
            [{'body': 'x', 'title': 'y'}], InvalidRow,
            r'rows\[0\]\.messages is missing.* \(body, title\) fit no format\. .*prompt_completion: prompt, completion',
        ),
        (
            [{'instruction': 'i', 'output': 'o', 'question': 'q', 'answer': 'a'}], InvalidRow,
            r"fit alpaca and gsm8k; pass format='alpaca'",
        ),
        (
            [{'prompt': 'a', 'completion': 'b'}, {'prompt': 'a'}], InvalidRow,
            r'rows\[1\]\.completion is missing: the format prompt_completion needs prompt, completion, .* has prompt',
        ),
        ([{'prompt': 'a', 'completion': 'b'}, {'text': 'c'}], InvalidRow, r'rows\[1\]\.prompt is missing: .* has text'),
        (
            [{'prompt': 'a', 'completion': [BLUE]}], InvalidRow,
            r'rows\[0\]\.prompt and the other columns must be all strings or .*; prompt is text, completion is list',
        ),
        ([{'prompt': [SKY], 'chosen': 'a', 'rejected': 'b'}], InvalidRow, 'prompt is list, chosen is text'),
        ([{'prompt': [{'text': 'a'}]}], InvalidRow, r'rows\[0\]\.prompt must be text or a list of messages, got list'),
        ([{'prompt': 3}], InvalidRow, r'rows\[0\]\.prompt must be text or a list of messages, got int'),
        ([{'text': ['a']}], InvalidRow, 'must be text, got list; write chats to the column messages'),
        ([{'chosen': 'a', 'rejected': 'a'}], InvalidRow, r'rows\[0\]\.chosen equals rejected'),
        ([{'prompt': 'a', 'completion': 'b', 'label': 'x'}], InvalidRow, r"label must be true or false, got 'x'"),
        ([{'question': 'q', 'answer': 'a'}], InvalidRow, r"answer does not end in '#### <number>'"),
        ([{'conversations': 'a'}], InvalidRow, 'conversations must be a list of messages, got str'),
        ([{'messages': [SKY]}, {'text': 'a'}], InvalidExample, r'rows\[1\]\.messages must be a list'),
        (
            [{'chosen': 'ab', 'rejected': 'ac'}, {'chosen': [SKY, {'role': 'robot'}], 'rejected': [SKY, GREEN]}],
            InvalidExample, r'rows\[1\]\.messages\[1\]\.role must be one of',
        ),
    ],
)  # fmt: skip
def test_rows_without_a_format_are_refused(
    rows: list[dict[str, Any]], error: type[Exception], problem: str, tiny_llama_dir: Path
) -> None:
    """The error names the row, its columns, the needed columns, and a solution; no row changes."""
    dataset = opened(DatasetMeta(data=rows), tiny_llama_dir)
    with pytest.raises(error, match=problem):
        dataset.encode()
    assert [dict(row) for row in dataset] == rows
    assert not dataset.is_encoded


def test_named_format_takes_precedence_over_the_columns(tiny_llama_dir: Path) -> None:
    """A named format is used although another format would be recognized; an unknown name is refused."""
    row = {'prompt': 'The sky is', 'completion': ' blue.', 'label': True, 'text': 'Plain.', 'messages': [SKY, GREEN]}
    texts: dict[str, str] = {}
    for name in ('messages', 'prompt_completion', 'prompt_only', 'language_modeling'):
        dataset = opened(DatasetMeta(data=[row]), tiny_llama_dir)
        dataset.encode(format=name)
        texts[name] = dataset.template.decode(dataset[0]['input_ids'])
    assert texts == {
        'messages': f'{OPENING}Green.<|im_end|>\n',
        'prompt_completion': 'The sky is blue.<|im_end|>',
        'prompt_only': 'The sky is',
        'language_modeling': 'Plain.<|im_end|>',
    }
    dataset = opened(DatasetMeta(data=[row]), tiny_llama_dir)
    with pytest.raises(InvalidArguments, match="format: unknown format 'dpo'; use one of messages, sharegpt"):
        dataset.encode(format='dpo')
    with pytest.raises(InvalidRow, match='chosen is missing: the format preference needs chosen, rejected'):
        dataset.encode(format='preference')


@pytest.mark.parametrize('suffix', ['jsonl', 'json', 'parquet', 'csv'])
def test_files_with_nested_columns_are_read(suffix: str, tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Messages in JSON and Parquet files, and JSON text in CSV files, give the features of rows in memory."""
    rows = [
        {'prompt': [SYSTEM, SKY], 'completion': [BLUE]},
        {'prompt': [SKY], 'completion': [{'role': 'assistant', 'content': 'Green.', 'reasoning_content': None}]},
    ]
    path = tmp_path / f'rows.{suffix}'
    match suffix:
        case 'jsonl':
            path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
        case 'json':
            path.write_text(json.dumps(rows))
        case 'parquet':
            pq.write_table(pa.Table.from_pylist(rows), path)
        case _:
            with path.open('w', newline='') as file:
                writer = csv.DictWriter(file, ['prompt', 'completion'])
                writer.writeheader()
                writer.writerows({name: json.dumps(value) for name, value in row.items()} for row in rows)
    expected, dataset = opened(DatasetMeta(data=rows), tiny_llama_dir), opened(DatasetMeta(str(path)), tiny_llama_dir)
    for each in (expected, dataset):
        each.encode()
    assert [shown(dataset, row)[1:] for row in dataset] == [shown(expected, row)[1:] for row in expected]
    assert [shown(dataset, row)[2] for row in dataset] == ['Blue.<|im_end|>', 'Green.<|im_end|>']


def test_chats_beside_a_question_as_text_are_pairs(tiny_llama_dir: Path) -> None:
    """Two complete chats in addition to a text are a pair, and their common beginning is the prompt."""
    row = {'prompt': 'Sky?', 'prompt_id': 'a1', 'chosen': [SKY, BLUE], 'rejected': [SKY, GREEN]}
    dataset = opened(DatasetMeta(data=[row]), tiny_llama_dir)
    dataset.encode()
    assert [shown(dataset, found)[0] for found in dataset] == [[SKY, BLUE], [SKY, GREEN]]
    assert [found['prompt_id'] for found in dataset] == ['a1', 'a1']


def test_chats_as_json_text_are_read(tiny_llama_dir: Path) -> None:
    """The columns `messages` and `conversations` of a CSV file contain JSON."""
    given = [{'from': 'human', 'value': 'Sky?'}, {'from': 'gpt', 'value': 'Blue.'}]
    for row in ({'messages': json.dumps([SKY, BLUE])}, {'conversations': json.dumps(given)}):
        dataset = opened(DatasetMeta(data=[row]), tiny_llama_dir)
        dataset.encode()
        assert shown(dataset, dataset[0]) == ([SKY, BLUE], CHAT, 'Blue.<|im_end|>')


def test_check_reads_the_formats(tiny_llama_dir: Path) -> None:
    """`check` removes rows that cannot be trained on, and keeps the other rows of the format unchanged."""
    rows = [{'prompt': 'a', 'completion': 'b'}, {'prompt': 'a', 'completion': ''}, {'prompt': 'a'}]
    dataset = opened(DatasetMeta(data=rows), tiny_llama_dir)
    (problem,) = dataset.check()
    assert problem.startswith('rows[2]: completion is missing: the format prompt_completion needs prompt, completion')
    assert [dict(row) for row in dataset] == rows[:2]


def test_processor_converts_one_of_several_datasets(tiny_llama_dir: Path) -> None:
    """`FormatProcessor` converts the rows of a dataset before it is mixed with a dataset of another format."""
    pairs = DatasetMeta(data=[{'prompt': [SKY], 'completion': [BLUE]}] * 2)
    alpaca = DatasetMeta(data=[{'instruction': 'Sky?', 'output': 'Green.'}] * 2)
    dataset = opened(pairs, tiny_llama_dir)
    dataset.add_dataset(alpaca)
    dataset.map('FormatProcessor', pairs)
    dataset.map('FormatProcessor', alpaca, init_args={'format': 'alpaca'})
    dataset.mix_dataset()
    assert dataset.encode() == []
    assert [shown(dataset, row)[2] for row in dataset] == ['Blue.<|im_end|>', 'Green.<|im_end|>'] * 2
    mixed = Dataset(DatasetMeta(data=[{'x': 1}]))
    with pytest.raises((DatasetError, InvalidRow), match='fit no format'):
        mixed.map('FormatProcessor')


def test_messages_with_the_weight_zero_have_no_labels(tiny_llama_dir: Path) -> None:
    """An assistant message with the weight 0 is context, and the weight is not part of the feature."""
    row = {'messages': [SKY, {**GREEN, 'weight': 0}, SKY, {**BLUE, 'weight': 1}]}
    dataset = opened(DatasetMeta(data=[row]), tiny_llama_dir)
    assert dataset.encode() == []
    assert shown(dataset, dataset[0])[0] == [SKY, GREEN, SKY, BLUE]
    assert shown(dataset, dataset[0])[2] == 'Blue.<|im_end|>'
    bad = opened(DatasetMeta(data=[{'messages': [SKY, {**BLUE, 'weight': 2}]}]), tiny_llama_dir)
    with pytest.raises(InvalidExample, match=r'messages\[1\]\.weight must be 0 or 1, got 2'):
        bad.encode()
