"""Tests of building losses, of their declarations, and of their errors.

Legend: R labels, K candidates of a label, V vocabulary, F features, D embedding width.
"""

import math

import pytest
import torch

from fixtures.loss_cases import CASES
from twinkle.component import InvalidComponentOptions, UnknownComponent
from twinkle.data_format import STREAMS, LossOutput
from twinkle.loss import (
    LOSSES,
    OUTPUT_NAMES,
    TINKER_LOSSES,
    CrossEntropyLoss,
    Loss,
    LossBatch,
    MissingOutput,
    MissingStream,
    build_loss,
    merge_metrics,
)


def batch_of(logps, features=None, **streams):
    """Return a batch of labels of weight 1 with the given log-probabilities."""
    count = len(logps)
    return LossBatch(
        logps_R=torch.tensor(logps, dtype=torch.float64, requires_grad=True),
        labels_R=torch.arange(count),
        weights_R=torch.ones(count, dtype=torch.float64),
        features_R=torch.tensor(features or [0] * count),
        streams={name: torch.tensor(values, dtype=torch.float64) for name, values in streams.items()},
    )


def test_feature_sums_are_independent():
    """The float32 sum over a feature is bitwise the same alone and among other features."""
    torch.manual_seed(0)
    lengths = [700, 1, 33, 0, 1024, 5]
    features = torch.repeat_interleave(torch.arange(6), torch.tensor(lengths))
    values = torch.randn(sum(lengths)) * 10.0 ** torch.randint(-6, 6, (sum(lengths),))
    batch = LossBatch(logps_R=values, labels_R=features, weights_R=values, features_R=features)
    sums = batch.feature_sum(values)
    assert batch.sequences.tolist() == [0, 1, 2, 4, 5]
    for position, index in enumerate(batch.sequences.tolist()):
        alone = batch.select(features == index)
        assert torch.equal(alone.feature_sum(alone.logps_R)[0], sums[position])
    assert torch.equal(batch.spread(sums)[features == 4], sums[3].expand(1024))


def test_rows_are_selected_together():
    """`select` keeps all per-label fields of the chosen rows aligned."""
    batch = batch_of([-1.0, -2.0, -3.0], features=[0, 1, 1], advantages=[1.0, 2.0, 3.0])
    chosen = batch.select(torch.tensor([True, False, True]))
    assert (chosen.logps_R.tolist(), chosen.features_R.tolist()) == ([-1.0, -3.0], [0, 1])
    assert chosen.streams['advantages'].tolist() == [1.0, 3.0]


def test_losses_by_name_class_instance_and_function():
    """`build_loss` accepts a name, a class, an instance and a function."""

    class CustomLoss(Loss):
        def __call__(self, batch):
            return LossOutput(loss=batch.logps_R.sum(), num_tokens=0)

    assert build_loss('CrossEntropyLoss', reduction='sum').reduction == 'sum'
    assert isinstance(build_loss(CustomLoss), CustomLoss)
    assert build_loss(custom_loss := CustomLoss()) is custom_loss
    function = build_loss(lambda batch: LossOutput(loss=batch.logps_R.sum(), num_tokens=0))
    assert (function(batch_of([1.0]))['loss'].item(), function.is_separable) == (1.0, False)


def test_registered_name_of_every_loss():
    """The registered name of a loss class or instance is the name that builds it."""
    for case in CASES:
        assert LOSSES.name_of(case.loss) == LOSSES.name_of(type(case.loss)) == case.name
    assert set(TINKER_LOSSES) < set(LOSSES.names)


def test_losses_declare_known_streams_and_outputs():
    """Losses declare only known streams and outputs, and no stream as both required and optional."""
    for case in CASES:
        loss = case.loss
        assert set(loss.required_streams).isdisjoint(loss.optional_streams)
        assert {*loss.required_streams, *loss.optional_streams} <= set(STREAMS)
        assert set(loss.required_outputs) <= set(OUTPUT_NAMES)
        assert (loss.candidate_stream in loss.required_streams) is ('candidate_logps' in loss.required_outputs)


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_a_required_stream_or_output_that_is_missing_is_named(case):
    """A missing required stream or output is refused with an error that names it."""
    loss, arrays = case.loss, case.arrays()
    for name in loss.required_streams:
        if name == loss.candidate_stream:
            continue  # its ids are read by the forward pass
        remaining = {other: values for other, values in arrays.streams.items() if other != name}
        with pytest.raises(MissingStream) as refusal:
            loss(LossBatch(**{**vars(arrays.torch()), 'streams': {k: torch.tensor(v) for k, v in remaining.items()}}))
        assert refusal.value.name == name
    for name in loss.required_outputs:
        suffix = {'candidate_logps': '_RK', 'embeddings': '_FD', 'logits': '_RV'}.get(name, '_R')
        with pytest.raises(MissingOutput) as refusal:
            loss(LossBatch(**{**vars(arrays.torch()), name + suffix: None}))
        assert refusal.value.name == name


REFUSED_OPTIONS = [
    ('CrossEntropyLoss', {'beta': 1.0}),
    ('CrossEntropyLoss', {'reduction': 'median'}),
    ('SoftCrossEntropyLoss', {'reduction': 'median'}),
    ('GRPOLoss', {'epsilon': 0.0}),
    ('GRPOLoss', {'epsilon_high': -0.1}),
    ('GRPOLoss', {'beta': -0.1}),
    ('GRPOLoss', {'beta': math.nan}),
    ('GRPOLoss', {'beta': '0.1'}),
    ('GRPOLoss', {'entropy_coef': math.inf}),
    ('GRPOLoss', {'temperature': 1.0}),
    ('DRGRPOLoss', {'max_completion_length': 0}),
    ('DRGRPOLoss', {'max_completion_length': 1.5}),
    ('SAPOLoss', {'tau_neg': 0.0}),
    ('SAPOLoss', {'epsilon': 0.2}),
    ('CISPOLoss', {'epsilon_high': 0.2}),
    ('PPOLoss', {'loss_agg_mode': 'mean'}),
    ('PPOValueLoss', {'epsilon': -1.0}),
    ('DPOLoss', {'loss_type': 'exo'}),
    ('DPOLoss', {'beta': 0.0}),
    ('DPOLoss', {'label_smoothing': 0.5}),
    ('DPOLoss', {'label_smoothing': 0.1, 'loss_type': 'ipo'}),
    ('DPOLoss', {'sft_weight': -1.0}),
    ('GKDLoss', {'beta': 1.1}),
    ('GKDLoss', {'temperature': 0.0}),
    ('GKDLoss', {'teacher': 'half'}),
    ('InfonceLoss', {'temperature': 0.0}),
    ('InfonceLoss', {'hard_negatives': 0}),
    ('InfonceLoss', {'include_qq': True, 'use_batch': False}),
    ('InfonceLoss', {'hard_negatives': 1.5}),
    ('InfonceLoss', {'use_batch': 'false'}),
    ('CrossEntropyLoss', {'dft': 'false'}),
    ('CrossEntropyLoss', {'ignore_index': 'none'}),
    ('MSELoss', {'ignore_index': math.inf}),
    ('DPOLoss', {'reference_free': 1}),
    ('GKDLoss', {'chunk_size': 0.5}),
    ('GRPOLoss', {'epsilon': True}),
    ('cross_entropy', {'reduction': 'mean'}),
    ('ppo', {'epsilon': 0.2}),
    ('ppo', {'clip_low_threshold': -0.1}),
    ('ppo', {'clip_low_threshold': 1.3}),
    ('dro', {'beta': -1.0}),
    ('stable_reinforce', {'kl_coeff': -1.0}),
]


@pytest.mark.parametrize(('name', 'options'), REFUSED_OPTIONS)
def test_unknown_options_and_values_out_of_range_are_refused(name, options):
    """Unknown options and values out of range are refused when the loss is built."""
    with pytest.raises(InvalidComponentOptions):
        build_loss(name, **options)


def test_unknown_loss_is_refused():
    """An unknown name is refused with the known names; instances and functions take no options."""
    with pytest.raises(UnknownComponent) as unknown:
        build_loss('stable')
    assert unknown.value.known == LOSSES.names
    with pytest.raises(InvalidComponentOptions):
        build_loss(CrossEntropyLoss(), reduction='sum')
    with pytest.raises(InvalidComponentOptions):
        build_loss(lambda batch: batch, beta=1)


def test_merged_metrics_are_weighted():
    """Metrics are averaged with the weights of the parts that have them, or reduced as their suffix states."""
    merged = merge_metrics(
        [
            LossOutput(metrics={'a': 1.0, 'n:sum': 2.0, 'top:max': 1.0, 'low:min': 1.0}, metric_weight=1.0),
            LossOutput(metrics={'a': 4.0, 'n:sum': 3.0, 'top:max': 5.0, 'low:min': 0.0}, metric_weight=2.0),
            LossOutput(metrics={'b': 7.0}),
            LossOutput(metrics={'c': 7.0}, metric_weight=0.0),
        ]
    )
    assert merged == {'a': 3.0, 'b': 7.0, 'c': 0.0, 'n:sum': 5.0, 'top:max': 5.0, 'low:min': 0.0}
