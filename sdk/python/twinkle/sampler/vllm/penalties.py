"""Penalties for sequences that another engine started. The logits processors run in vLLM's workers.

The tokens sampled so far are passed to vLLM as the end of the prompt, but vLLM's presence and frequency penalties
ignore prompts. Such sequences therefore use the penalties of this module. V is the vocabulary size.

vLLM has two model runners with different interfaces for logits processors, and each refuses the classes of the other,
so this module has one class for each runner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate, LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from twinkle.data_format import SamplingParams as OurParams

_KEY = 'twinkle_penalties'


@dataclass
class _Row:
    """Penalties of one sequence. vLLM appends to `sampled_ids`."""

    prompt: Sequence[int]
    begun: Sequence[int]
    """End of `prompt`: the tokens that another engine sampled."""
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
    """Applies the penalties in vLLM's V1 model runner."""

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


class ContinuedPenaltiesV2(LogitsProcessorV2):
    """Applies the penalties in vLLM's V2 model runner, which identifies requests by the index of their slot."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        del vllm_config
        self._states = req_states
        self._given: dict[int, Sequence[Any]] = {}
        """Arguments of the penalties, by slot. The entry of a finished request remains until its slot is reused."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Read the penalties of a request, and return whether it has any."""
        self._given.pop(req_idx, None)
        given = (sampling_params.extra_args or {}).get(_KEY)
        if given is not None:
            self._given[req_idx] = given
        return given is not None

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Apply the penalties to the logits in place."""
        if self._given.keys().isdisjoint(ctx.idx_mapping_np.tolist()):
            return logits
        for index, slot in enumerate(ctx.expanded_idx_mapping.tolist()):
            if slot in self._given:
                self._row(slot, index, ctx).apply(logits[index])
        return logits

    def _row(self, slot: int, index: int, ctx: LogitsContext) -> _Row:
        # Tokens of a draft model are not committed yet and are in the input only.
        draft_count = int(ctx.expanded_local_pos[index])
        committed = int(ctx.pos[index]) + 1 - draft_count
        tokens: list[int] = self._states.all_token_ids.gpu[slot, :committed].tolist()
        tokens += ctx.input_ids[index + 1 - draft_count : index + 1].tolist()
        prompt_length = int(self._states.prompt_len.np[slot])
        return _row_of(self._given[slot], tokens[:prompt_length], tokens[prompt_length:])


def penalty_processor(*, is_v2: bool) -> str:
    """Return the import path of the class for a model runner of vLLM."""
    kind = ContinuedPenaltiesV2 if is_v2 else ContinuedPenalties
    return f'{kind.__module__}:{kind.__qualname__}'


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
    return None if given is None or prompt is None else _row_of(given, prompt, sampled_ids)


def _row_of(given: Sequence[Any], prompt: list[int], sampled_ids: list[int]) -> _Row:
    count, repetition, presence, frequency = given
    return _Row(prompt, prompt[len(prompt) - count :], sampled_ids, repetition, presence, frequency)
