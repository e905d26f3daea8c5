"""Embeddings of prompts: vLLM's workers copy the hidden state of the last prompt token before it is discarded.

The engine marks a request with a key, and takes the embedding with this key from the workers when the prompt has been
computed. vLLM has two model runners, and this module has one function for each. D is the hidden size.
"""

from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from vllm.sampling_params import SamplingParams

EMBEDDING_KEY = 'twinkle_embedding'
"""Key in vLLM's `extra_args` for the key of the request's embedding."""
MAX_KEPT = 4096
"""Maximum number of embeddings in a worker. Aborted requests leave embeddings behind; the oldest embeddings are
dropped."""


class KeptEmbeddings:
    """Embeddings that the engine has not taken yet."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def record(self, key: str, hidden_TD: Tensor, row: int) -> None:
        """Copy one row of hidden states as float32, and drop the oldest embedding if there are too many."""
        self._kept.pop(key, None)
        self._kept[key] = hidden_TD[row].float().cpu().numpy().tobytes()
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def take(self, key: str) -> bytes:
        """Remove and return the float32 values of an embedding; empty if this worker does not have it."""
        return self._kept.pop(key, b'')


kept = KeptEmbeddings()
"""Embeddings in this worker's process."""


def key_of(params: SamplingParams | None) -> str:
    """Return the key of the embedding that a request needs; empty if it needs none."""
    return ((params and params.extra_args) or {}).get(EMBEDDING_KEY, '')


def record_v1(runner: Any, scheduler_output: Any, hidden_TD: Tensor) -> None:
    """Record the embeddings of the prompts that a step of vLLM's V1 model runner completed."""
    batch = runner.input_batch
    for index, request_id in enumerate(batch.req_ids[: batch.num_reqs]):
        key = key_of(runner.requests[request_id].sampling_params)
        if key:
            row = _last_row(
                first_row=int(runner.query_start_loc.np[index]),
                computed=int(batch.num_computed_tokens_cpu[index]),
                scheduled=scheduler_output.num_scheduled_tokens[request_id],
                prompt_length=int(batch.num_prompt_tokens[index]),
            )
            _record(key, hidden_TD, row)


def record_v2(keys: dict[str, str], batch: Any, prompt_lengths: npt.NDArray[Any], hidden_TD: Tensor) -> None:
    """Record the embeddings of the prompts that a step of vLLM's V2 model runner completed.

    Args:
        keys: key of the embedding of each request that needs one.
        batch: the requests of the step.
        prompt_lengths: number of prompt tokens by vLLM's index of a request.
        hidden_TD: hidden states of the step.
    """
    for index, request_id in enumerate(batch.req_ids):
        if request_id in keys:
            row = _last_row(
                first_row=int(batch.query_start_loc_np[index]),
                computed=int(batch.num_computed_prefill_tokens_np[index]),
                scheduled=int(batch.num_scheduled_tokens[index]),
                prompt_length=int(prompt_lengths[batch.idx_mapping_np[index]]),
            )
            _record(keys[request_id], hidden_TD, row)


def embedding_of(parts: list[bytes]) -> npt.NDArray[np.float32] | None:
    """Return float32 [D], the embedding among the workers' answers; None if no worker has it."""
    found = next(filter(None, parts), b'')
    return np.frombuffer(found, np.float32) if found else None


def _last_row(*, first_row: int, computed: int, scheduled: int, prompt_length: int) -> int | None:
    """Return the row of the last prompt token; None if the step does not compute this token."""
    offset = prompt_length - 1 - computed
    return first_row + offset if 0 <= offset < scheduled else None


def _record(key: str, hidden_TD: Tensor, row: int | None) -> None:
    if row is not None:
        kept.record(key, hidden_TD, row)
