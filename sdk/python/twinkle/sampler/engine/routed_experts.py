"""Experts of the computed tokens, for requests with `return_routed_experts`; see `twinkle.nn.expert_routing`.

The experts of the prompt are recorded once for all sequences of a group, and the experts of sampled tokens with each
sequence.
"""

from collections.abc import Sequence as Items

import numpy as np

from twinkle.nn import ExpertRouting, RoutingShape
from twinkle.sampler.engine.pack import PackItem
from twinkle.sampler.engine.request import Experts
from twinkle.sampler.engine.sequence import SampleGroup, Sequence


def recording_of(items: Items[PackItem], shape: RoutingShape) -> ExpertRouting | None:
    """Return the recording of a step, or None if no request of the step returns experts."""
    is_requested = any(item.request.params.return_routed_experts for item in items)
    return ExpertRouting(shape) if is_requested else None


def record(items: Items[PackItem], item_rows: Items[range], routing: ExpertRouting) -> None:
    """Append the experts of a computed step to the records of the requests that return experts."""
    chosen_TLA = routing.chosen(max(rows.stop for rows in item_rows)).cpu().numpy()
    for item, rows in zip(items, item_rows, strict=True):
        if item.request.params.return_routed_experts:
            # A view would keep the experts of all rows of the step in memory.
            item.experts.append(chosen_TLA[rows.start : rows.stop].copy())


def experts_of(group: SampleGroup, sequence: Sequence | None = None) -> Experts | None:
    """Return the experts of a group's prompt and of a sequence's tokens; None if they were not requested."""
    if not group.request.params.return_routed_experts:
        return None
    return np.concatenate([*group.experts, *(sequence.experts if sequence else ())])
