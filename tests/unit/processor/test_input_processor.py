"""Tests of the validation of features and of packing them into rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.dataset import DatasetMeta, PackingDataset
from twinkle.processor import InputLimits, InputProcessor, InvalidFeatures

LIMITS = InputLimits(vocab_size=50, max_tokens=16)
FEATURE = {'input_ids': [1, 2, 3, 4], 'labels': [2, 3, 4, -100]}


def pack(*features, **options):
    return InputProcessor()(features, LIMITS, **options)


def test_features_become_adjacent_rows():
    """Two features become rows without padding, and the batch has the row and feature of each label."""
    batch = pack(FEATURE, {'input_ids': [7, 8], 'labels': [-100, 9], 'loss_weights': [1.0, 0.5]})
    assert batch.input_ids_T.tolist() == [1, 2, 3, 4, 7, 8]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.sequence_bounds == ((0, 4), (4, 6))
    assert batch.rows_R.tolist() == [0, 1, 2, 5]
    assert batch.labels_R.tolist() == [2, 3, 4, 9]
    assert batch.weights_R.tolist() == [1.0, 1.0, 1.0, 0.5]
    assert batch.features_R.tolist() == [0, 0, 0, 1]


def test_masked_tokens_are_not_computed():
    """Padding on either side is not computed and has value 0 in the result."""
    padded = {'input_ids': [0, 1, 2, 0], 'labels': [5, 2, 3, 5], 'attention_mask': [0, 1, 1, 0]}
    batch = pack(padded)
    assert batch.token_count == 2
    assert [values.tolist() for values in batch.by_feature(np.array([1.5, 2.5]))] == [[0.0, 1.5, 2.5, 0.0]]


def test_packed_samples_are_separate_sequences():
    """A position that restarts at 0 starts a new sequence."""
    batch = pack({**FEATURE, 'position_ids': [0, 1, 0, 1]}, FEATURE)
    assert batch.sequence_bounds == ((0, 2), (2, 4), (4, 8))


def test_packed_dataset_is_accepted(tiny_llama_dir):
    """A pack of a dataset becomes one sequence per sample; additional fields of the samples are ignored."""
    rows = [{'messages': [{'role': 'assistant', 'content': text}], 'source': text} for text in ('ab', 'c')]
    dataset = PackingDataset(DatasetMeta(data=rows))
    dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=64)
    dataset.encode()
    dataset.pack_dataset()
    (pack_,) = dataset
    assert [sample['source'] for sample in pack_['samples']] == ['ab', 'c']
    assert len(InputProcessor()([pack_], InputLimits(vocab_size=320, max_tokens=64)).sequence_bounds) == 2


def test_ignored_labels_get_no_rows():
    """Labels of weight 0, and labels that the loss ignores, get no row."""
    batch = pack({**FEATURE, 'loss_weights': [0, 1, 1, 1]}, ignore_index=4)
    assert batch.labels_R.tolist() == [3]


def test_streams_follow_their_labels():
    """The values of streams are gathered at the counted labels."""
    batch = pack({**FEATURE, 'advantages': [1, 2, 3, 4]})
    assert batch.streams['advantages'].tolist() == [1.0, 2.0, 3.0]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=5))
def test_gather_undoes_by_feature(masks):
    """`gather` is the inverse of `by_feature` for any counted labels."""
    features = [{'input_ids': [1] * len(mask), 'labels': [2 if on else -100 for on in mask]} for mask in masks]
    batch = pack(*features)
    values = np.arange(batch.label_count, dtype=np.float32) + 1
    assert batch.gather(batch.by_feature(values)).tolist() == values.tolist()


REFUSED = {
    'no ids': ({'labels': [1]}, 'input_ids'),
    'empty ids': ({'input_ids': [], 'labels': []}, 'input_ids'),
    'no labels': ({'input_ids': [1]}, 'labels'),
    'ids beyond the vocabulary': ({**FEATURE, 'input_ids': [1, 2, 50, 4]}, 'input_ids[2]'),
    'negative id': ({**FEATURE, 'input_ids': [-1, 2, 3, 4]}, 'input_ids[0]'),
    'label beyond the vocabulary': ({**FEATURE, 'labels': [2, 3, 4, 50]}, 'labels[3]'),
    'labels of another length': ({**FEATURE, 'labels': [2, 3]}, 'labels'),
    'ids that are floats': ({**FEATURE, 'input_ids': [1.5, 2, 3, 4]}, 'input_ids'),
    'ragged ids': ({**FEATURE, 'input_ids': [[1], [2, 3]]}, 'input_ids'),
    'two dimensions': ({**FEATURE, 'input_ids': [[1, 2, 3, 4]]}, 'input_ids'),
    'words': ({**FEATURE, 'loss_weights': ['a', 'b', 'c', 'd']}, 'loss_weights'),
    'weights not finite': ({**FEATURE, 'loss_weights': [1, 1, float('inf'), 1]}, 'loss_weights[2]'),
    'weights too large for float32': ({**FEATURE, 'loss_weights': [1, 1e300, 1, 1]}, 'loss_weights[1]'),
    'mask of twos': ({**FEATURE, 'attention_mask': [1, 2, 1, 1]}, 'attention_mask'),
    'all masked': ({**FEATURE, 'attention_mask': [0, 0, 0, 0]}, 'attention_mask'),
    'decreasing positions': ({**FEATURE, 'position_ids': [0, 2, 1, 3]}, 'position_ids'),
    'negative position': ({**FEATURE, 'position_ids': [-1, 0, 1, 2]}, 'position_ids'),
    'too long': ({'input_ids': [1] * 17, 'labels': [1] * 17}, 'input_ids'),
    'unknown field': ({**FEATURE, 'unknown': [1]}, ''),
    'images for a text model': ({**FEATURE, 'pixel_values': [1]}, 'pixel_values'),
}


@pytest.mark.parametrize('name', REFUSED)
def test_malformed_features_are_refused(name):
    """The error about a malformed feature contains the feature's index and the field."""
    feature, field = REFUSED[name]
    with pytest.raises(InvalidFeatures) as refusal:
        pack(FEATURE, feature)
    assert (refusal.value.index, refusal.value.field) == (1, field)


def test_a_stream_on_some_features_only_is_refused():
    """A stream that only some features have is refused with the first feature that lacks it."""
    with pytest.raises(InvalidFeatures) as refusal:
        pack({**FEATURE, 'advantages': [1, 2, 3, 4]}, FEATURE)
    assert (refusal.value.index, refusal.value.field) == (1, 'advantages')


def test_an_empty_batch_is_refused():
    """A batch without features is refused."""
    with pytest.raises(InvalidFeatures):
        pack()


@pytest.mark.parametrize('options', [{'framework': 'megatron'}, {'padding_side': 'top'}])
def test_unsupported_options_are_refused(options):
    """Unsupported values of the arguments `framework` and `padding_side` are refused."""
    with pytest.raises(ValueError, match=next(iter(options))):
        InputProcessor(**options)
