"""Tests of streams: selection, gathering at labels, and validation."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twinkle.loss import LOSSES, build_loss
from twinkle.processor import STREAM_NAMES, FeatureNeeds, InputLimits, InputProcessor, InvalidFeatures, ignored_streams

LIMITS = InputLimits(vocab_size=50, max_tokens=4096)
FEATURE = {'input_ids': [1, 2, 3, 4], 'labels': [2, -100, 4, 5]}
TOPK = {
    'teacher_topk_ids': [[1, 2], [3, 4], [5, 6], [7, 8]],
    'teacher_topk_logps': [[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0], [-7.0, -8.0]],
}


def pack(*features, needs=None, limits=LIMITS):
    return InputProcessor()(features, limits, needs=needs)


def test_wide_streams_follow_their_labels():
    """Wide streams of ids and numbers are gathered at the counted labels, without padding."""
    padded = {name: [[9, 9], *values] for name, values in TOPK.items()}
    feature = {**FEATURE, **TOPK}
    other = {'input_ids': [0, 1, 2, 3, 4], 'labels': [7, 2, -100, 4, 5], 'attention_mask': [0, 1, 1, 1, 1], **padded}
    batch = pack(feature, other)
    ids, logps = batch.streams['teacher_topk_ids'], batch.streams['teacher_topk_logps']
    assert (ids.dtype, logps.dtype) == (np.int64, np.float32)
    assert ids.tolist() == [[1, 2], [5, 6], [7, 8]] * 2
    assert logps.tolist() == [[-1.0, -2.0], [-5.0, -6.0], [-7.0, -8.0]] * 2


def test_only_declared_streams_are_packed():
    """Only streams that the loss declares are packed and validated."""
    feature = {
        **FEATURE,
        'advantages': [1, 2, 3, 4],
        'old_logps': [0, 0, 0, 0],
        'ref_logps': ['not', 'a', 'number', ''],
    }
    needs = FeatureNeeds.of_loss(build_loss('GRPOLoss'), more_streams=('returns',))
    assert needs.streams == ('advantages', 'old_logps', 'returns')
    assert set(pack(feature, needs=needs).streams) == {'advantages', 'old_logps'}


def test_custom_streams_are_packed():
    """A loss may declare custom streams of numbers or ids, in one or two dimensions, that other losses do not know."""
    feature = {**FEATURE, 'margins': [1, 2, 3, 4], 'rival_ids': TOPK['teacher_topk_ids']}
    batch = pack(feature, needs=FeatureNeeds(streams=('margins', 'rival_ids')))
    assert batch.streams['margins'].tolist() == [1.0, 3.0, 4.0]
    assert batch.streams['rival_ids'].shape == (3, 2)
    with pytest.raises(InvalidFeatures, match='margins'):
        pack(feature)


REFUSED_STREAMS = {
    'not finite': ({'advantages': [1, 2, float('nan'), 4]}, 'advantages[2]'),
    'not finite though masked': ({'old_logps': [1, float('-inf'), 3, 4]}, 'old_logps[1]'),
    'too large for float32': ({'returns': [1, 2, 3, -1e39]}, 'returns[3]'),
    'words': ({'ref_logps': ['a', 'b', 'c', 'd']}, 'ref_logps'),
    'too short': ({'advantages': [1, 2, 3]}, 'advantages'),
    'a matrix': ({'advantages': [[1], [2], [3], [4]]}, 'advantages'),
    'a number': ({'advantages': 1.0}, 'advantages'),
    'nothing': ({'advantages': None}, 'advantages'),
    'a vector in place of candidates': ({'teacher_topk_logps': [1, 2, 3, 4]}, 'teacher_topk_logps'),
    'no candidates': ({'teacher_topk_logps': [[], [], [], []]}, 'teacher_topk_logps'),
    'an infinite candidate': ({'teacher_topk_logps': [[0, 0]] * 3 + [[0, np.inf]]}, 'teacher_topk_logps[3, 1]'),
    'ragged candidates': ({'teacher_topk_ids': [[1, 2], [3], [4, 5], [6, 7]]}, 'teacher_topk_ids'),
    'ids that are floats': ({'teacher_topk_ids': [[1.0], [2.0], [3.0], [4.0]]}, 'teacher_topk_ids'),
    'ids beyond the vocabulary': ({'teacher_topk_ids': [[1], [2], [50], [4]]}, 'teacher_topk_ids'),
    'negative ids': ({'target_ids': [[1], [2], [-1], [4]]}, 'target_ids'),
    'logits of another vocabulary': ({'teacher_logits': np.zeros((4, 49), np.float32)}, 'teacher_logits'),
    'flags of 2': ({'completion_mask': [0, 1, 2, 1]}, 'completion_mask'),
}  # fmt: skip


@pytest.mark.parametrize('name', REFUSED_STREAMS)
def test_malformed_streams_are_refused(name):
    """The error about a malformed stream contains the feature's index, the field and the element."""
    fields, path = REFUSED_STREAMS[name]
    good = {other: values for other, values in TOPK.items() if other in fields}
    with pytest.raises(InvalidFeatures) as refusal:
        pack({**FEATURE, **good}, {**FEATURE, **fields})
    assert (refusal.value.index, refusal.value.field) == (1, path)


def test_features_must_have_equally_many_candidates():
    """The first feature whose number of candidates differs is refused."""
    narrow = {name: [row[:1] for row in rows] for name, rows in TOPK.items()}
    with pytest.raises(InvalidFeatures) as refusal:
        pack({**FEATURE, **TOPK}, {**FEATURE, **TOPK}, {**FEATURE, **narrow})
    assert (refusal.value.index, refusal.value.field) == (2, 'teacher_topk_ids')


@given(st.data())
def test_masked_numbers_have_no_effect(data):
    """Numbers at padding, at ignored labels and at labels of weight 0 do not change the packed batch."""
    length = data.draw(st.integers(1, 8))
    bits = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    numbers = st.lists(st.floats(-9, 9, width=32), min_size=length, max_size=length)
    real, shown, weighty = (data.draw(bits) for _ in range(3))
    real[data.draw(st.integers(0, length - 1))] = 1
    feature = {
        'input_ids': data.draw(st.lists(st.integers(0, 49), min_size=length, max_size=length)),
        'labels': [label if on else -100 for on, label in zip(shown, range(length), strict=True)],
        'attention_mask': real,
        'loss_weights': [0.5 * on for on in weighty],
        'advantages': data.draw(numbers),
        'teacher_topk_logps': [[number, 1.0] for number in data.draw(numbers)],
    }
    counts = np.array(real) * shown * weighty == 1
    changed = dict(feature)
    noise = np.array(data.draw(numbers), np.float32)
    changed['advantages'] = np.where(counts, feature['advantages'], noise)
    changed['teacher_topk_logps'] = np.where(counts[:, None], feature['teacher_topk_logps'], noise[:, None])
    changed['input_ids'] = np.where(real, feature['input_ids'], 49)
    first, second = pack(feature), pack(changed)
    assert first.label_count == counts.sum()
    for name in ('input_ids_T', 'position_ids_T', 'rows_R', 'labels_R', 'weights_R', 'offsets_R', 'last_rows_F'):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    for name in first.streams:
        assert np.array_equal(first.streams[name], second.streams[name])


def test_labels_count_only_for_sampled_tokens():
    """A label counts if the mask marks the next token, which the label predicts. The last label always counts."""
    feature = {'input_ids': [1, 2, 3, 4], 'labels': [2, 3, 4, 5], 'completion_mask': [0, 0, 1, 0]}
    assert pack(feature).offsets_R.tolist() == [1, 3]
    assert pack({**feature, 'completion_mask': [1, 1, 1, 1]}).offsets_R.tolist() == [0, 1, 2, 3]


def test_labels_of_weight_0_are_packed_on_request():
    """Labels of weight 0 are packed on request; ignored labels are never packed."""
    feature = {**FEATURE, 'loss_weights': [0, 0, 1, 0]}
    assert pack(feature).offsets_R.tolist() == [2]
    batch = pack(feature, needs=FeatureNeeds(are_weightless_kept=True))
    assert (batch.offsets_R.tolist(), batch.weights_R.tolist()) == ([0, 2, 3], [0.0, 1.0, 0.0])


def test_single_label_of_a_pooled_feature():
    """A loss of whole features accepts a single label at the last unmasked token; other losses refuse such a label."""
    needs = FeatureNeeds.of_loss(build_loss('InfonceLoss'))
    anchor = {'input_ids': [1, 2, 3, 0], 'labels': [1], 'attention_mask': [1, 1, 1, 0]}
    batch = pack(anchor, {'input_ids': [4], 'labels': [0]}, {'input_ids': [5, 6], 'labels': [-100, 0]}, needs=needs)
    assert (batch.labels_R.tolist(), batch.offsets_R.tolist()) == ([1, 0, 0], [2, 0, 1])
    assert batch.last_rows_F.tolist() == [2, 3, 5]
    with pytest.raises(InvalidFeatures) as refusal:
        pack(anchor)
    assert refusal.value.field == 'labels'


def test_wide_values_are_returned_by_feature():
    """Wide values are returned per feature, with zeros at ignored labels."""
    batch = pack(FEATURE, {'input_ids': [1], 'labels': [2]})
    first, second = batch.by_feature(np.arange(8.0).reshape(4, 2))
    assert first.tolist() == [[0, 1], [0, 0], [2, 3], [4, 5]]
    assert second.tolist() == [[6, 7]]


@pytest.mark.parametrize('name', LOSSES.names)
def test_ignored_streams_are_reported(name):
    """Every stream of a feature is either declared by the loss or reported as ignored."""
    loss = build_loss(name)
    features = [{**FEATURE}, {**FEATURE, **dict.fromkeys(STREAM_NAMES, [0] * 4)}]
    ignored = ignored_streams(features, loss)
    assert set(ignored) == set(STREAM_NAMES) - {*loss.required_streams, *loss.optional_streams}
    assert list(ignored) == sorted(ignored)
    assert ignored_streams([FEATURE], loss) == ()


def test_advantages_under_cross_entropy_are_reported():
    """A stream that the loss ignores is reported, unless a metric reads it."""
    features = [{**FEATURE, 'advantages': [1, 2, 3, 4]}]
    assert ignored_streams(features, build_loss('CrossEntropyLoss')) == ('advantages',)
    assert ignored_streams(features, build_loss('CrossEntropyLoss'), more_streams=('advantages',)) == ()


def test_packing_copies_only_counted_rows():
    """Packing 16 MB of logits allocates less than 2.5 MB, because only the rows of counted labels are copied."""
    limits = InputLimits(vocab_size=500, max_tokens=4096)
    labels = np.full(2000, -100)
    labels[[5, 900, 1999]] = 7
    feature = {
        'input_ids': np.ones(2000, np.int64),
        'labels': labels,
        'teacher_logits': np.ones((2000, 500), np.float32),
    }
    tracemalloc.start()
    try:
        batch = pack(feature, feature, feature, feature, limits=limits)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert batch.streams['teacher_logits'].shape == (12, 500)
    assert peak < 2_500_000


def test_torch_tensors_are_accepted():
    """Streams may be torch tensors."""
    batch = pack({**FEATURE, 'advantages': torch.tensor([1.0, 2.0, 3.0, 4.0])})
    assert batch.streams['advantages'].tolist() == [1.0, 3.0, 4.0]
