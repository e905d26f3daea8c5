"""Compares per-label metrics with plain Python implementations.

Legend: R labels, F features, D embedding width.
"""

import json
import math
import statistics

import numpy as np
import pytest

from twinkle.component import InvalidComponentOptions
from twinkle.metric import METRICS, CompletionRewardMetric, ForwardFacts, LabelFacts, StepFacts

STREAMS = ('old_logps', 'advantages', 'ref_logps', 'returns', 'old_values', 'rewards', 'sampler_logps')


def batch(seed, *, lengths=(3, 1, 4, 2), streams=STREAMS, scale=1.0):
    """Return the results of a random batch with the given numbers of labels per feature."""
    random = np.random.default_rng(seed)
    features = np.repeat(np.arange(len(lengths)), lengths)

    def random_values():
        return (scale * random.standard_normal(len(features))).astype(np.float32)

    labels = LabelFacts(
        logps_R=-np.abs(random_values()),
        features_R=features,
        streams={name: random_values() for name in streams},
        entropies_R=np.abs(random_values()),
        is_greedy_R=random_values() > 0,
        values_R=random_values(),
        embeddings_FD=random.standard_normal((len(lengths), 5)).astype(np.float32),
    )
    return ForwardFacts(
        features=(),
        loss_sum=float(random.standard_normal()),
        label_count=len(features),
        token_count=2 * len(features),
        loss_metrics={'kl': float(random.standard_normal())},
        labels=labels,
    )


def report(name, *facts, **options):
    """Return the values of a metric over batches."""
    metric = METRICS.build(name, options)
    for item in facts:
        metric.accumulate(item)
    return metric.calculate()


def rows(*facts):
    """Yield one dict of Python numbers per label of all batches."""
    for number, item in enumerate(facts):
        labels = item.labels
        for index, logp in enumerate(labels.logps_R):
            streams = {name: float(values[index]) for name, values in labels.streams.items()}
            yield {
                **streams,
                'sequence': (number, int(labels.features_R[index])),
                'new': float(logp),
                'entropy': float(labels.entropies_R[index]),
                'value': float(labels.values_R[index]),
            }


def k3(log_ratio):
    """Return Schulman's k3 estimator."""
    return math.exp(log_ratio) - log_ratio - 1


FACTS = (batch(1), batch(2, lengths=(2, 5)))


def test_policy_metrics_are_means_over_labels():
    """Values of the policy metric cover the labels of all batches; clip ratios have a separate test."""
    found, labels = report('GRPOMetric', *FACTS), list(rows(*FACTS))
    mean = statistics.fmean
    diffs = [row['new'] - row['old_logps'] for row in labels]
    of_sampler = [row['new'] - row['sampler_logps'] for row in labels]
    expected = {
        'train/mean_new_logp': mean(row['new'] for row in labels),
        'train/policy_confidence': math.exp(mean(row['new'] for row in labels)),
        'train/entropy': mean(row['entropy'] for row in labels),
        'train/mean_old_logp': mean(row['old_logps'] for row in labels),
        'train/logp_diff_mean': mean(diffs),
        'train/approx_kl': mean(map(k3, diffs)),
        'train/token_kl_max': max(map(k3, diffs)),
        'train/token_ratio_max': math.exp(max(diffs)),
        'train/token_ratio_mean': mean(map(math.exp, diffs)),
        'train/sampler_kl': mean(map(k3, of_sampler)),
        'train/sampler_ratio_max': math.exp(max(of_sampler)),
        'train/ref_kl': mean(k3(row['ref_logps'] - row['new']) for row in labels),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def sequences(labels):
    """Return (mean log ratio, mean advantage) of each sequence."""
    groups = {}
    for row in labels:
        groups.setdefault(row['sequence'], []).append(row)
    return [
        (
            statistics.fmean(row['new'] - row['old_logps'] for row in group),
            statistics.fmean(row['advantages'] for row in group),
        )
        for group in groups.values()
    ]


@pytest.mark.parametrize('name', ['GRPOMetric', 'PPOMetric', 'GSPOMetric', 'CISPOMetric'])
def test_each_policy_metric_clips_as_its_loss(name):
    """The clip ratios of each policy metric follow the clipping rule of its loss."""
    labels = list(rows(*FACTS))
    pairs = [(row['new'] - row['old_logps'], row['advantages']) for row in labels]
    if name == 'GSPOMetric':
        pairs = sequences(labels)
    is_signed = name != 'CISPOMetric'
    low = [math.exp(d) < 0.8 and (a < 0 or not is_signed) for d, a in pairs]
    high = [math.exp(d) > 1.3 and (a > 0 or not is_signed) for d, a in pairs]
    found = report(name, *FACTS, epsilon=0.2, epsilon_high=0.3)
    assert found['train/clip_ratio_low'] == pytest.approx(statistics.fmean(low))
    assert found['train/clip_ratio_high'] == pytest.approx(statistics.fmean(high))
    assert found['train/clip_ratio'] == pytest.approx(statistics.fmean(low) + statistics.fmean(high))
    assert 0 < found['train/clip_ratio'] < 1


def test_values_of_missing_streams_are_omitted():
    """Values whose streams are missing are not reported."""
    alone = report('GRPOMetric', batch(1, streams=()))
    assert set(alone) == {'train/mean_new_logp', 'train/policy_confidence', 'train/entropy'}
    assert 'train/clip_ratio' not in report('GRPOMetric', batch(1, streams=('old_logps',)))
    assert report('PPOValueMetric', batch(1, streams=())) == {}


def test_extreme_ratios_are_finite():
    """Log-probabilities that differ by thousands of nats give finite values."""
    values = report('GRPOMetric', batch(1, scale=1e4))
    assert all(math.isfinite(value) for value in values.values())


def test_value_metrics_cover_all_batches():
    """Value metrics are computed over the labels of all batches together."""
    found, labels = report('PPOValueMetric', *FACTS, epsilon=0.5), list(rows(*FACTS))
    errors = [row['returns'] - row['value'] for row in labels]
    returns = [row['returns'] for row in labels]
    assert found == pytest.approx(
        {
            'train/value_mean': statistics.fmean(row['value'] for row in labels),
            'train/return_mean': statistics.fmean(returns),
            'train/explained_variance': 1 - statistics.pvariance(errors) / statistics.pvariance(returns),
            'train/value_clip_ratio': statistics.fmean(abs(row['value'] - row['old_values']) > 0.5 for row in labels),
            'train/advantage_mean': statistics.fmean(row['advantages'] for row in labels),
            'train/advantage_std': statistics.pstdev(row['advantages'] for row in labels),
        }
    )


def test_equal_returns_have_no_explained_variance():
    """The explained variance is omitted if all returns are equal."""
    facts = batch(1)
    facts.labels.streams['returns'][:] = 2.0
    found = report('PPOValueMetric', facts)
    assert found['train/return_mean'] == 2.0
    assert 'train/explained_variance' not in found


def test_preferences_sum_over_whole_responses():
    """Preference metrics sum over a response's labels and average over pairs, which begin with the chosen response."""
    found = report('DPOMetric', *FACTS, beta=0.5)
    sums, refs = {}, {}
    for row in rows(*FACTS):
        sums[row['sequence']] = sums.get(row['sequence'], 0) + row['new']
        refs[row['sequence']] = refs.get(row['sequence'], 0) + row['ref_logps']
    chosen = [key for key in sums if key[1] % 2 == 0]
    pairs = [(key, (key[0], key[1] + 1)) for key in chosen]
    gains = [(0.5 * (sums[a] - refs[a]), 0.5 * (sums[b] - refs[b])) for a, b in pairs]
    assert found == pytest.approx(
        {
            'logps/chosen': statistics.fmean(sums[a] for a, _ in pairs),
            'logps/rejected': statistics.fmean(sums[b] for _, b in pairs),
            'logps/ref_chosen': statistics.fmean(refs[a] for a, _ in pairs),
            'logps/ref_rejected': statistics.fmean(refs[b] for _, b in pairs),
            'rewards/chosen': statistics.fmean(a for a, _ in gains),
            'rewards/rejected': statistics.fmean(b for _, b in gains),
            'rewards/margins': statistics.fmean(a - b for a, b in gains),
            'rewards/accuracies': statistics.fmean(a > b for a, b in gains),
        }
    )


def test_incomplete_pairs_are_skipped():
    """A feature whose partner is missing or has no labels is skipped."""
    facts = batch(1, lengths=(2, 0, 1, 3, 2))
    whole = [row for row in rows(facts) if row['sequence'][1] in (2, 3)]
    found = report('DPOMetric', facts)
    assert found['logps/chosen'] == pytest.approx(sum(row['new'] for row in whole if row['sequence'][1] == 2))
    assert found['logps/rejected'] == pytest.approx(sum(row['new'] for row in whole if row['sequence'][1] == 3))


@pytest.mark.parametrize('group_size', [2, 3])
def test_embeddings_are_compared_by_cosine(group_size):
    """Anchors are compared with their positive, with other groups' positives and with their hard negatives."""
    facts = batch(1, lengths=(1,) * 7)
    found = report('EmbeddingMetric', facts, group_size=group_size)
    vectors = facts.labels.embeddings_FD.astype(float)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    count = 7 // group_size
    own = [vectors[g * group_size] @ vectors[g * group_size + 1] for g in range(count)]
    others = [
        vectors[g * group_size] @ vectors[h * group_size + 1] for g in range(count) for h in range(count) if g != h
    ]
    others += [
        vectors[g * group_size] @ vectors[g * group_size + k] for g in range(count) for k in range(2, group_size)
    ]
    assert found == pytest.approx(
        {'pos_sim': np.mean(own), 'pos_sim_min': min(own), 'pos_sim_max': max(own), 'neg_sim': np.mean(others)}
    )


def test_accuracy_is_the_share_of_greedy_labels():
    """Accuracy is the fraction of all labels, not the mean of the batches' fractions."""
    hits = [bool(hit) for item in FACTS for hit in item.labels.is_greedy_R]
    assert report('Accuracy', *FACTS) == pytest.approx({'accuracy': statistics.fmean(hits)})


def test_rewards_come_from_features_or_from_the_loop():
    """A feature's reward counts once per completion; a loop's rewards are reported by name, and times as means."""
    metric = CompletionRewardMetric()
    metric.accumulate(FACTS[0])
    metric.accumulate(rewards={'format': [1.0, 0.0]}, completion_lengths=[7], generate_time=2.0)
    metric.accumulate(rewards={'format': [0.5]}, generate_time=4.0, weight_sync_time=1.0)
    first = [float(FACTS[0].labels.streams['rewards'][index]) for index in (0, 3, 4, 8)]
    assert metric.calculate() == pytest.approx(
        {
            'train/total_reward': statistics.fmean(first),
            'train/total_reward_std': statistics.stdev(first),
            'train/format_reward': 0.5,
            'train/format_reward_std': 0.5,
            'train/completion_length': statistics.fmean([3, 1, 4, 2, 7]),
            'profiling/generate_seconds': 3.0,
            'profiling/weight_sync_seconds': 1.0,
        }
    )


def test_unused_arguments_accept_only_none():
    """None for inputs and outputs is accepted; other values are refused."""
    metric = CompletionRewardMetric()
    metric.accumulate(None, None, completion_lengths=[7], rewards={'format': [1.0]})
    assert metric.calculate()['train/format_reward'] == 1.0
    for arguments in ([{'input_ids': [1]}], None), (None, {'logits': 1}):
        with pytest.raises(TypeError, match='rewards='):
            metric.accumulate(*arguments)


def metric_with_batches(name, *, clock=None):
    """Return a metric with the results of two batches and a step."""
    metric = METRICS.build(name, {'clock': clock} if clock else {})
    for item in FACTS:
        metric.accumulate(item)
    metric.accumulate_step(StepFacts(learning_rate=0.1, step_count=3, grad_norm=0.7))
    return metric


@pytest.mark.parametrize('name', METRICS.names)
def test_restored_state_continues_bitwise(name):
    """A metric that is restored from JSON reports bitwise the same values, except values that depend on the clock."""
    metric, restored = metric_with_batches(name), METRICS.build(name, {})
    restored.load_state(json.loads(json.dumps(metric.state(), allow_nan=False)))
    for item in (metric, restored):
        item.accumulate(batch(5))
        item.accumulate_step(StepFacts(learning_rate=0.2, step_count=4, grad_norm=0.9))
    found, expected = restored.calculate(), metric.calculate()
    assert found.keys() == expected.keys() != set()
    for value in found.keys() - metric.wall_clock_values:
        assert found[value] == expected[value]


@pytest.mark.parametrize('name', METRICS.names)
def test_a_state_is_a_copy(name):
    """A saved state does not change when further results are accumulated."""
    metric = metric_with_batches(name)
    saved = metric.state()
    copy = dict(saved)
    metric.accumulate(batch(5))
    assert saved == copy


@pytest.mark.parametrize('name', METRICS.names)
def test_invalid_state_is_refused(name):
    """A state with values other than numbers is refused and changes nothing."""
    metric = metric_with_batches(name)
    before = metric.calculate().keys()
    for invalid in ({'labels': 'many'}, {'labels': True}, {'x': [1, 'a']}):
        with pytest.raises(ValueError, match='state'):
            metric.load_state(invalid)
    assert metric.calculate().keys() == before


@pytest.mark.parametrize('name', METRICS.names)
def test_every_value_is_a_float_with_a_unit(name):
    """Every value is a float, and every value except the loss's metrics has a unit."""
    values = metric_with_batches(name).calculate()
    assert all(type(value) is float for value in values.values())
    assert values.keys() - METRICS.build(name, {}).units.keys() <= {'kl'}


@pytest.mark.parametrize('name', METRICS.names)
def test_reset_clears_the_state(name):
    """A metric after `reset` reports a new metric's values; only the last learning rate and step count remain."""
    metric = metric_with_batches(name)
    metric.reset()
    assert not metric.calculate().keys() - {'learning_rate', 'step_count', 'elapsed_seconds'}
    metric.accumulate(FACTS[1])
    fresh = METRICS.build(name, {})
    fresh.accumulate(FACTS[1])
    found, expected = metric.calculate(), fresh.calculate()
    assert all(found[value] == expected[value] for value in expected.keys() - metric.wall_clock_values)


@pytest.mark.parametrize('name', METRICS.names)
def test_results_without_labels_are_accepted(name):
    """Results without labels and empty batches are accepted by every metric."""
    metric = METRICS.build(name, {})
    metric.accumulate(ForwardFacts(features=(), loss_sum=1.0, label_count=2, token_count=3, loss_metrics={}))
    metric.accumulate(batch(1, lengths=()))
    assert all(math.isfinite(value) for value in metric.calculate().values())


def test_elapsed_time_excludes_the_time_between_processes():
    """A restored metric adds the time since its restoration to the elapsed seconds of its state."""
    now = [1000.0]
    metric = metric_with_batches('TrainMetric', clock=lambda: now[0])
    now[0] += 4.0
    saved = metric.state()
    later = [5.0]
    restored = METRICS.build('TrainMetric', {'clock': lambda: later[0]})
    restored.load_state(saved)
    later[0] += 1.0
    assert restored.calculate()['elapsed_seconds'] == 5.0


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('GRPOMetric', {'epsilon': 0.0}),
        ('GRPOMetric', {'epsilon': -0.1}),
        ('GRPOMetric', {'epsilon_high': math.nan}),
        ('GRPOMetric', {'epsilon': 'wide'}),
        ('GRPOMetric', {'temperature': 1.0}),
        ('PPOValueMetric', {'epsilon': True}),
        ('DPOMetric', {'beta': 0.0}),
        ('DPOMetric', {'beta': math.inf}),
        ('EmbeddingMetric', {'group_size': 1}),
        ('EmbeddingMetric', {'group_size': 2.5}),
        ('EmbeddingMetric', {'group_size': 'two'}),
        ('TrainMetric', {'clock': 3.0}),
        ('Accuracy', {'threshold': 0.5}),
        ('LossMetric', {'reduction': 'mean'}),
    ],
)
def test_bad_options_are_refused(name, options):
    """Unknown and invalid options are refused."""
    with pytest.raises(InvalidComponentOptions):
        METRICS.build(name, options)
