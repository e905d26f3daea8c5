"""Streams: per-token tensors that losses and metrics read in addition to the labels.

The training engine, the services and the client use this list. A feature contains a stream under its name, with one
row per token, such as `InputFeature.advantages`. A stream without a field in the contract is sent in `extra_tensors`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Form of a stream with T tokens and K columns."""

    meaning: str
    """Description of the values."""
    kind: Literal['float', 'id'] = 'float'
    """'float' for float32 values, or 'id' for token ids, which are int64 in the engine."""
    is_wide: bool = False
    """Whether the shape is [T, K] with K at least 1, instead of [T]."""
    is_field: bool = False
    """Whether the contract's InputFeature has a field with this name."""


STREAMS: Mapping[str, StreamSpec] = MappingProxyType(
    {
        'advantages': StreamSpec(meaning='advantage of each label', is_field=True),
        'old_logps': StreamSpec(meaning='log-probability of each label at the time of sampling', is_field=True),
        'ref_logps': StreamSpec(meaning='log-probability of each label under the reference model', is_field=True),
        'returns': StreamSpec(meaning='return of each label, to which values are fitted'),
        'old_values': StreamSpec(meaning='value of each label at the time of sampling'),
        'teacher_topk_ids': StreamSpec(meaning="the teacher's most likely ids at each label", kind='id', is_wide=True),
        'teacher_topk_logps': StreamSpec(meaning='log-probabilities of teacher_topk_ids', is_wide=True),
        'teacher_logits': StreamSpec(meaning="the teacher's logits at each label", is_wide=True),
        'target_ids': StreamSpec(meaning='candidates that replace each label', kind='id', is_wide=True),
        'target_weights': StreamSpec(meaning='factors of the log-probabilities of target_ids', is_wide=True),
        'logprob_gradients': StreamSpec(
            meaning="gradient of the caller's loss with respect to each label's log-probability"
        ),
        'clip_low_threshold': StreamSpec(meaning='lower bound of the policy ratio of each label'),
        'clip_high_threshold': StreamSpec(meaning='upper bound of the policy ratio of each label'),
        'sampler_logps': StreamSpec(meaning='log-probability of each label under the engine that sampled it'),
        'sequence_ratio_mask': StreamSpec(meaning='1 if a label counts for the ratio of its sequence, else 0'),
        'rewards': StreamSpec(meaning='reward of the completion that contains each label, for metrics'),
    }
)
"""Streams that losses and metrics may declare. Other names are refused."""

EXTRA_STREAMS: Mapping[str, StreamSpec] = MappingProxyType(
    {name: spec for name, spec in STREAMS.items() if not spec.is_field}
)
"""Streams that are sent in `extra_tensors`."""
