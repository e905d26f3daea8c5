"""What rollouts came to, as numbers by name."""

from collections.abc import Iterable, Sequence

from twinkle.data_format import InputFeature
from twinkle.rollout.episode import EndReason, Rollout
from twinkle.rollout.staleness import staleness_of


def rollout_numbers(rollouts: Sequence[Rollout], *, version: int | None = None) -> dict[str, float]:
    """Return means over rollouts; nothing of none.

    `rollout/reward`, `rollout/turns`, `rollout/sampled_tokens`, `rollout/tokens`; `rollout/end/<reason>`, shares;
    `rollout/logp`, the mean natural log-probability of the drawn tokens under the policy that drew them, whose
    negative estimates its entropy; `rollout/facts/<name>`, the environment's numbers, 0 where one has none.
    With a version, `staleness/mean` and `staleness/max`, in versions.

    Args:
        rollouts: of one batch.
        version: the trainer's newest, to tell ages by.

    Raises:
        UnknownVersion: a version is given, and a rollout with drawn tokens names none of its own.
    """
    if not rollouts:
        return {}
    names = sorted({name for rollout in rollouts for name in rollout.facts})
    numbers = {
        'rollout/reward': _mean(rollout.reward for rollout in rollouts),
        'rollout/turns': _mean(rollout.turn_count for rollout in rollouts),
        'rollout/sampled_tokens': _mean(rollout.sampled_count for rollout in rollouts),
        'rollout/tokens': _mean(rollout.feature.get('length', 0) for rollout in rollouts),
        'rollout/logp': _mean_logp(rollouts),
    }
    numbers |= {f'rollout/end/{reason}': _mean(one.end_reason is reason for one in rollouts) for reason in EndReason}
    numbers |= {f'rollout/facts/{name}': _mean(one.facts.get(name, 0.0) for one in rollouts) for name in names}
    if version is not None:
        ages = [staleness_of(rollout, version=version, index=index) for index, rollout in enumerate(rollouts)]
        numbers |= {'staleness/mean': _mean(ages), 'staleness/max': float(max(ages))}
    return numbers


def as_sampler_logps(feature: InputFeature) -> InputFeature:
    """Return a copy whose log-probabilities are named as the sampler's, for losses with a `correction`.

    `old_logps` is then free for what the trainer itself gives the same tokens; without it the batch is taken to be
    the newest policy's, and the correction is all that stands between both engines.

    Raises:
        ValueError: the feature has no `old_logps`.
    """
    if 'old_logps' not in feature:
        raise ValueError('old_logps is missing; give a feature as a sampler or a rollout made it')
    renamed = {('sampler_logps' if name == 'old_logps' else name): value for name, value in feature.items()}
    return InputFeature(**renamed)  # pyright: ignore[reportCallIssue, reportArgumentType] (a stream, not a field)


def _mean(values: Iterable[float]) -> float:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed)


def _mean_logp(rollouts: Sequence[Rollout]) -> float:
    count = sum(rollout.sampled_count for rollout in rollouts)
    return sum(float(sum(rollout.feature.get('old_logps', ()))) for rollout in rollouts) / max(count, 1)
