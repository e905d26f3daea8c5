"""Metrics of a batch of rollouts, and the conversion of sampled log-probabilities to a stream of losses."""

from collections.abc import Iterable, Sequence

from twinkle.data_format import InputFeature
from twinkle.rollout.episode import EndReason, Rollout
from twinkle.rollout.staleness import staleness_of


def rollout_numbers(rollouts: Sequence[Rollout], *, version: int | None = None) -> dict[str, float]:
    """Return metrics of a batch of rollouts, by name; an empty mapping for an empty batch.

    - `rollout/reward`, `rollout/turns`, `rollout/sampled_tokens`, `rollout/tokens`: means.
    - `rollout/end/<reason>`: fraction of the rollouts that ended for this reason.
    - `rollout/logp`: mean natural log-probability of the sampled tokens under the policy that sampled them. Its
      negative estimates the policy's entropy.
    - `rollout/facts/<name>`: mean of an environment's fact; a missing fact counts as 0.
    - `staleness/mean`, `staleness/max`: age in versions, if `version` is given.

    Args:
        rollouts: rollouts of one batch.
        version: the newest adapter version.

    Raises:
        UnknownVersion: `version` is given, and a rollout with sampled tokens has no version spans.
        ValueError: a rollout was sampled with a later version than `version`.
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
    """Return a copy with `old_logps` renamed to `sampler_logps`, for losses with a `correction`.

    `old_logps` can then be set to the trainer's log-probabilities of the same tokens. Without `old_logps`, the loss
    uses the current policy instead. The policy ratio is then 1, and the loss corrects for the difference between
    the current policy and the sampler's.

    Raises:
        ValueError: the feature has no `old_logps`.
    """
    if 'old_logps' not in feature:
        raise ValueError('old_logps is missing; pass a feature returned by a sampler or a rollout')
    renamed = {('sampler_logps' if name == 'old_logps' else name): value for name, value in feature.items()}
    return InputFeature(**renamed)  # pyright: ignore[reportCallIssue, reportArgumentType] (not a declared field)


def _mean(values: Iterable[float]) -> float:
    listed = [float(value) for value in values]
    return sum(listed) / len(listed)


def _mean_logp(rollouts: Sequence[Rollout]) -> float:
    count = sum(rollout.sampled_count for rollout in rollouts)
    return sum(float(sum(rollout.feature.get('old_logps', ()))) for rollout in rollouts) / max(count, 1)
