"""Tests of the values that metrics report."""

import pytest

from twinkle.metric import METRICS, ForwardFacts, LossMetric, StepFacts, TrainMetric


def forward(loss_sum, label_count, **loss_metrics):
    """Return the results of a batch."""
    return ForwardFacts(
        features=(), loss_sum=loss_sum, label_count=label_count, token_count=2 * label_count, loss_metrics=loss_metrics
    )


def test_the_loss_is_the_mean_over_labels_of_all_batches():
    """The loss is a mean over labels; the metrics of the loss are means over batches."""
    metric = LossMetric()
    assert metric.calculate() == {}
    metric.accumulate(forward(10.0, 2, ratio=1.0))
    metric.accumulate(forward(2.0, 4, ratio=2.0))
    assert metric.calculate() == {'loss': 2.0, 'label_count': 6.0, 'ratio': 1.5}
    metric.reset()
    assert metric.calculate() == {}


def test_rates_cover_the_time_since_the_last_report():
    """Throughput is measured since the last reset; a reset keeps the last learning rate and step count."""
    now = [100.0]
    metric = TrainMetric(clock=lambda: now[0])
    metric.accumulate(forward(1.0, 5))
    metric.accumulate_step(StepFacts(learning_rate=0.5, step_count=3, grad_norm=2.0))
    metric.accumulate_step(StepFacts(learning_rate=0.25, step_count=4, grad_norm=None))
    now[0] += 2.0
    assert metric.calculate() == {
        'elapsed_seconds': 2.0,
        'tokens_per_second': 5.0,
        'steps_per_second': 1.0,
        'learning_rate': 0.25,
        'step_count': 4.0,
        'grad_norm': 2.0,
    }
    metric.reset()
    assert metric.calculate() == {'elapsed_seconds': 0.0, 'learning_rate': 0.25, 'step_count': 4.0}


def test_rates_without_steps_or_tokens_are_left_out():
    """No rate of steps is reported before the first step, and no rate of tokens before the first batch."""
    now = [100.0]
    metric = TrainMetric(clock=lambda: now[0])
    now[0] += 2.0
    assert metric.calculate() == {'elapsed_seconds': 2.0}
    metric.accumulate(forward(1.0, 5))
    assert metric.calculate() == {'elapsed_seconds': 2.0, 'tokens_per_second': 5.0}


@pytest.mark.parametrize('name', METRICS.names)
def test_every_metric_is_built_by_name(name):
    """Every metric can be built by name and reports floats."""
    assert all(isinstance(value, float) for value in METRICS.build(name, {}).calculate().values())
