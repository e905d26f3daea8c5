"""The numbers beside the labels that losses read, by name: one list for the trainer, the wire and the client.

A feature carries them under these names, one row a token, as `InputFeature` carries `advantages`.
Those that are no field of their own in the contract travel in its `extra_tensors`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """What a stream looks like; T tokens, K columns."""

    meaning: str
    """For messages."""
    kind: Literal['float', 'id'] = 'float'
    """float32, or token ids, int64 in the trainer."""
    is_wide: bool = False
    """[T, K] with K at least 1, else [T]."""
    is_field: bool = False
    """Whether the contract's InputFeature has a field of this name."""


STREAMS: Mapping[str, StreamSpec] = MappingProxyType(
    {
        'advantages': StreamSpec(meaning='advantage of each label', is_field=True),
        'old_logps': StreamSpec(meaning='log-probability of each label when it was sampled', is_field=True),
        'ref_logps': StreamSpec(meaning='log-probability of each label under the reference model', is_field=True),
        'returns': StreamSpec(meaning='return of each label, to fit values to'),
        'old_values': StreamSpec(meaning='value of each label when it was sampled'),
        'teacher_topk_ids': StreamSpec(meaning="the teacher's likeliest ids at each label", kind='id', is_wide=True),
        'teacher_topk_logps': StreamSpec(meaning='their log-probabilities under the teacher', is_wide=True),
        'teacher_logits': StreamSpec(meaning="the teacher's logits at each label", is_wide=True),
        'target_ids': StreamSpec(meaning='candidates in the place of each label', kind='id', is_wide=True),
        'target_weights': StreamSpec(meaning='factors of their log-probabilities', is_wide=True),
        'logprob_gradients': StreamSpec(meaning="gradient of the caller's loss by each label's log-probability"),
        'clip_low_threshold': StreamSpec(meaning='smallest ratio of each label, where it is not one for all'),
        'clip_high_threshold': StreamSpec(meaning='largest ratio of each label, where it is not one for all'),
        'sampler_logps': StreamSpec(meaning='log-probability of each label under the engine that sampled it'),
        'sequence_ratio_mask': StreamSpec(meaning="1 where a label counts for its sequence's ratio, else 0"),
        'rewards': StreamSpec(meaning='reward of the completion each label is of, for metrics'),
    }
)
"""Every stream a built-in loss or metric may declare. A name that is not here is refused, wherever it comes in."""

EXTRA_STREAMS: Mapping[str, StreamSpec] = MappingProxyType(
    {name: spec for name, spec in STREAMS.items() if not spec.is_field}
)
"""Those that travel in `extra_tensors`."""
