"""Penalties for sequences that another engine started. Runs in vLLM's workers.

The tokens sampled so far are passed to vLLM as the end of the prompt, which its presence and frequency penalties
ignore. Such sequences therefore use these penalties instead of vLLM's. V is the vocabulary size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor

from twinkle.data_format import SamplingParams as OurParams

CONTINUED_PENALTIES = 'twinkle.sampler.vllm.penalties:ContinuedPenalties'
"""Import path of the class for vLLM."""
_KEY = 'twinkle_penalties'


@dataclass
class _Row:
    """Penalties of one sequence. vLLM appends to `sampled_ids`."""

    prompt: Sequence[int]
    begun: Sequence[int]
    sampled_ids: Sequence[int]
    repetition: float
    presence: float
    frequency: float

    def apply(self, logits_V: Tensor) -> None:
        """Apply the penalties in place, in vLLM's order."""
        # A token that is not known yet when a step is prepared is -1.
        new = torch.tensor([*self.begun, *(token for token in self.sampled_ids if token >= 0)], dtype=torch.long)
        seen = torch.cat([torch.tensor(self.prompt, dtype=torch.long), new]).unique().to(logits_V.device)
        if self.repetition != 1.0:
            chosen = logits_V[seen]
            logits_V[seen] = torch.where(chosen > 0, chosen / self.repetition, chosen * self.repetition)
        tokens, counts = new.to(logits_V.device).unique(return_counts=True)
        logits_V[tokens] -= self.frequency * counts + self.presence


class ContinuedPenalties(LogitsProcessor):
    """Applies the penalties; implements vLLM's interface."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: FBT001 - vLLM's
        del vllm_config, device, is_pin_memory
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False, because penalties also affect greedy sampling."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows after a change of the batch."""
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """Apply the penalties to the logits in place."""
        for index, row in self._rows.items():
            row.apply(logits[index])
        return logits


def penalty_arguments(params: OurParams, sampled_ids: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's parameters for the penalties of a sequence."""
    penalties = {
        'repetition_penalty': params.repetition_penalty,
        'presence_penalty': params.presence_penalty,
        'frequency_penalty': params.frequency_penalty,
    }
    if not sampled_ids or not (params.presence_penalty or params.frequency_penalty):
        return penalties
    return {'extra_args': {_KEY: [len(sampled_ids), *penalties.values()]}}


def _row(params: SamplingParams, prompt: list[int] | None, sampled_ids: list[int]) -> _Row | None:
    given = (params.extra_args or {}).get(_KEY)
    if given is None or prompt is None:
        return None
    count, repetition, presence, frequency = given
    return _Row(prompt, prompt[len(prompt) - count :], sampled_ids, repetition, presence, frequency)
