"""Penalties of sequences that another engine began. Runs in vLLM's workers.

vLLM gets the tokens drawn so far as the end of the prompt, and its presence and frequency penalties do not
look there. So such a sequence is drawn with vLLM's own penalties off and with these. V is the vocabulary size.
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
"""How vLLM is told of the class."""
_KEY = 'twinkle_penalties'


@dataclass
class _Row:
    """One sequence; `drawn` grows as vLLM draws."""

    prompt: Sequence[int]
    begun: Sequence[int]
    drawn: Sequence[int]
    repetition: float
    presence: float
    frequency: float

    def apply(self, logits_V: Tensor) -> None:
        """Change the logits in place, in vLLM's own order."""
        # A step that is prepared before the last one's token is known has -1 in its place.
        new = torch.tensor([*self.begun, *(token for token in self.drawn if token >= 0)], dtype=torch.long)
        seen = torch.cat([torch.tensor(self.prompt, dtype=torch.long), new]).unique().to(logits_V.device)
        if self.repetition != 1.0:
            chosen = logits_V[seen]
            logits_V[seen] = torch.where(chosen > 0, chosen / self.repetition, chosen * self.repetition)
        tokens, counts = new.to(logits_V.device).unique(return_counts=True)
        logits_V[tokens] -= self.frequency * counts + self.presence


class ContinuedPenalties(LogitsProcessor):
    """Implements vLLM's interface."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: FBT001 - vLLM's
        """Begin without rows."""
        del vllm_config, device, is_pin_memory
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return that greedy drawing is concerned, too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch."""
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: Tensor) -> Tensor:
        """Change the rows concerned, in place."""
        for index, row in self._rows.items():
            row.apply(logits[index])
        return logits


def penalty_arguments(params: OurParams, drawn: Sequence[int]) -> dict[str, Any]:
    """Return what of vLLM's parameters says how a sequence is penalised."""
    own = {
        'repetition_penalty': params.repetition_penalty,
        'presence_penalty': params.presence_penalty,
        'frequency_penalty': params.frequency_penalty,
    }
    if not drawn or not (params.presence_penalty or params.frequency_penalty):
        return own
    return {'extra_args': {_KEY: [len(drawn), *own.values()]}}


def _row(params: SamplingParams, prompt: list[int] | None, drawn: list[int]) -> _Row | None:
    given = (params.extra_args or {}).get(_KEY)
    if given is None or prompt is None:
        return None
    count, repetition, presence, frequency = given
    return _Row(prompt, prompt[len(prompt) - count :], drawn, repetition, presence, frequency)
