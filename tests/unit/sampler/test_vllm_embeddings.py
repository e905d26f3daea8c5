"""Unit tests of the embeddings that vLLM's workers record: rows of completed prompts, in both model runners."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker

from twinkle.sampler.vllm import embeddings
from twinkle.sampler.vllm.embeddings import EMBEDDING_KEY, MAX_KEPT, KeptEmbeddings

HIDDEN = torch.arange(40, dtype=torch.bfloat16).reshape(20, 2)
"""Hidden states of a step with 20 rows."""
REQUESTS = {
    'whole': {'computed': 0, 'scheduled': 4, 'prompt': 4},
    'first chunk': {'computed': 0, 'scheduled': 5, 'prompt': 9},
    'last chunk': {'computed': 6, 'scheduled': 3, 'prompt': 9},
    'decode': {'computed': 9, 'scheduled': 1, 'prompt': 9},
    'resumed': {'computed': 0, 'scheduled': 7, 'prompt': 5},
}
"""Requests of the step: computed tokens, rows of the step, and length of the prompt. A resumed request recomputes
tokens that it had sampled before it was preempted."""
EXPECTED = {'whole': 3, 'last chunk': 11, 'resumed': 17}
"""Row of the last prompt token of each request whose prompt the step completes."""


def keys() -> dict[str, str]:
    """Return the key of each request's embedding."""
    return {name: f'{name}/0' for name in REQUESTS}


def taken() -> dict[str, list[float]]:
    """Take the embeddings of all requests, and return those that were recorded."""
    found = {name: embeddings.embedding_of([b'', embeddings.kept.take(key)]) for name, key in keys().items()}
    return {name: vector.tolist() for name, vector in found.items() if vector is not None}


def begins() -> np.ndarray:
    """Return the first row of each request, and the number of rows."""
    return np.cumsum([0, *(request['scheduled'] for request in REQUESTS.values())])


def column(name: str) -> np.ndarray:
    """Return a value of all requests."""
    return np.asarray([request[name] for request in REQUESTS.values()])


def record_v1() -> None:
    """Record the step as the V1 model runner does."""
    parameters = {name: SamplingParams(extra_args={EMBEDDING_KEY: key}) for name, key in keys().items()}
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(
            req_ids=[*REQUESTS],
            num_reqs=len(REQUESTS),
            num_computed_tokens_cpu=column('computed'),
            num_prompt_tokens=column('prompt'),
        ),
        requests={name: SimpleNamespace(sampling_params=given) for name, given in parameters.items()},
        query_start_loc=SimpleNamespace(np=begins()),
    )
    scheduled = {name: request['scheduled'] for name, request in REQUESTS.items()}
    embeddings.record_v1(runner, SimpleNamespace(num_scheduled_tokens=scheduled), HIDDEN)


def record_v2() -> None:
    """Record the step as the V2 model runner does, which orders its request indices differently."""
    order = np.arange(len(REQUESTS))[::-1]
    batch = SimpleNamespace(
        req_ids=[*REQUESTS],
        query_start_loc_np=begins(),
        num_computed_prefill_tokens_np=column('computed'),
        num_scheduled_tokens=column('scheduled'),
        idx_mapping_np=order,
    )
    embeddings.record_v2(keys(), batch, column('prompt')[order], HIDDEN)


@pytest.mark.parametrize('record', [record_v1, record_v2])
def test_step_records_the_last_row_of_each_completed_prompt(record) -> None:
    """Whole prompts, last chunks and resumed prompts are recorded as float32; other requests are not."""
    record()
    assert taken() == {name: HIDDEN[row].float().tolist() for name, row in EXPECTED.items()}
    assert taken() == {}


def test_v2_worker_has_the_arguments_that_the_patch_uses() -> None:
    """The installed vLLM passes the values that `record_v2` reads, by the same names."""
    fields = {'req_ids', 'query_start_loc_np', 'num_computed_prefill_tokens_np', 'num_scheduled_tokens'}
    assert fields | {'idx_mapping_np'} <= InputBatch.__dataclass_fields__.keys()
    scores = inspect.signature(PromptLogprobsWorker.compute_prompt_token_id_logprobs)
    assert list(scores.parameters) == ['self', 'logits_fn', 'hidden_states', 'input_batch', 'prompt_lens']
    added = inspect.signature(PromptLogprobsWorker.add_request)
    assert list(added.parameters) == ['self', 'req_id', 'req_idx', 'sampling_params']


def test_oldest_embeddings_are_dropped() -> None:
    """Requests that never take their embedding cannot fill the memory."""
    kept = KeptEmbeddings()
    for index in range(MAX_KEPT + 1):
        kept.record(str(index), HIDDEN, 0)
    assert kept.take('0') == b''
    assert kept.take('1')
    assert kept.take(str(MAX_KEPT))


def test_repeated_embedding_is_the_newest() -> None:
    """An embedding that is recorded again is not dropped as the oldest one."""
    kept = KeptEmbeddings()
    for index in range(MAX_KEPT):
        kept.record(str(index), HIDDEN, 0)
    kept.record('0', HIDDEN, 1)
    kept.record('new', HIDDEN, 0)
    assert kept.take('0')
    assert kept.take('1') == b''
