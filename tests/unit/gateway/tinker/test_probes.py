"""Log-probabilities of chosen and drawn tokens in a prompt: requests, refusals, and responses that the SDK reads."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tinker import TensorData
from tinker.proto.response_conv import deserialize_sample_response

from twinkle.api.sampler.v1 import sampler_service_pb2 as native
from twinkle.data_format.prompt_probe import MAX_PROMPT_DRAWS, MAX_TARGETS
from twinkle_services.gateway.tinker.datums import probe_from_json
from twinkle_services.gateway.tinker.results import sample_to_json, sample_to_proto
from twinkle_services.gateway.tinker.sampling import sample_request
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.tensors import tensor_to_proto

TARGETS = st.tuples(st.integers(1, 12), st.integers(1, 6)).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.integers(-1, 9))
)
"""Matrices of tokens, with -1 at entries for which no score is requested."""


def json_of(tensor: TensorData) -> dict[str, Any]:
    """Return the tensor as the SDK sends it in a JSON body."""
    fields = {
        'data': tensor.data,
        'dtype': tensor.dtype,
        'shape': tensor.shape,
        'sparse_crow_indices': tensor.sparse_crow_indices,
        'sparse_col_indices': tensor.sparse_col_indices,
    }
    return {name: value for name, value in fields.items() if value is not None}


def csr(data: list[int], rows: list[int], columns: list[int], shape: list[int]) -> dict[str, Any]:
    """Return a sparse tensor in JSON."""
    indices = {'sparse_crow_indices': rows, 'sparse_col_indices': columns}
    return {'data': data, 'dtype': 'int64', 'shape': shape, **indices}


def dense(data: list[Any], shape: list[int] | None, dtype: str = 'int64') -> dict[str, Any]:
    """Return a dense tensor in JSON."""
    return {'data': data, 'dtype': dtype, 'shape': shape}


@given(targets=TARGETS, is_compressed=st.booleans())
def test_scores_have_the_layout_of_the_request(*, targets: np.ndarray, is_compressed: bool) -> None:
    """Target matrices reach the sampler unchanged, and the SDK reads scores in the same layout; JSON is dense."""
    matrix = torch.from_numpy(targets)
    sent = TensorData.from_torch_sparse(matrix, pad_value=-1) if is_compressed else TensorData.from_torch(matrix)
    body = json_of(sent)
    probe = probe_from_json(body, 0, prompt_length=len(targets) + 1)
    assert probe is not None
    assert np.frombuffer(probe.target_token_ids.data, '<i4').reshape(targets.shape).tolist() == targets.tolist()

    scores = np.where(targets < 0, np.nan, -1.5 - targets).astype(np.float32)
    result = native.SampleBatchResponse()
    result.prompt.target_logprobs.CopyFrom(tensor_to_proto(scores))
    facts = {'is_sparse': sent.sparse_crow_indices is not None}
    read = deserialize_sample_response(sample_to_proto(result, facts).SerializeToString()).target_prompt_logprobs
    document = sample_to_json(result, facts)['target_prompt_logprobs']
    assert read is not None
    assert read.sparse_crow_indices == sent.sparse_crow_indices
    assert read.sparse_col_indices == sent.sparse_col_indices
    for found in (read, TensorData(**document)):
        assert (found.dtype, found.shape) == ('float32', list(targets.shape))
        np.testing.assert_array_equal(found.to_torch().numpy(), np.where(targets < 0, 0, scores))


def test_sdk_reads_drawn_tokens() -> None:
    """The SDK reads drawn tokens as int64 and their scores as float32, including from JSON."""
    result = native.SampleBatchResponse()
    tokens, logprobs = np.array([[5, 6], [7, 5]], np.int32), np.array([[-1, -2], [-3, -np.inf]], np.float32)
    result.prompt.drawn_token_ids.CopyFrom(tensor_to_proto(tokens))
    result.prompt.drawn_logprobs.CopyFrom(tensor_to_proto(logprobs))
    read = deserialize_sample_response(sample_to_proto(result, {}).SerializeToString())
    assert read.target_prompt_logprobs is None
    assert read.prompt_alt_tokens is not None
    assert (read.prompt_alt_tokens.tokens.dtype, read.prompt_alt_tokens.logprobs.dtype) == ('int64', 'float32')
    np.testing.assert_array_equal(read.prompt_alt_tokens.tokens.to_numpy(), tokens)
    np.testing.assert_array_equal(read.prompt_alt_tokens.logprobs.to_numpy(), logprobs)
    document = sample_to_json(result, {})['prompt_alt_tokens']
    assert (document['tokens']['data'], document['logprobs']['data'][3]) == ([5, 6, 7, 5], None)


@pytest.mark.parametrize(
    ('field', 'fields'),
    [
        ('target_prompt_logprobs', {'target_prompt_logprobs': [[1]]}),
        ('target_prompt_logprobs.data', {'target_prompt_logprobs': {'dtype': 'int64', 'shape': [3, 1]}}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1.0, 1.0, 1.0], [3, 1], 'float32')}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, 2, 3], [3])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, 2, 3], None)}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, 2], [2, 1])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, 2, 3, 4], [4, 1])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, 2, 3], [3, 1, 1])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([], [3, 0])}),
        (
            'target_prompt_logprobs',
            {'target_prompt_logprobs': csr([], [0, 0, 0, 0], [], [3, MAX_TARGETS + 1])},
        ),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, 2], [3, 1])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, -2, 3], [3, 1])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': dense([1, 1 << 31, 3], [3, 1])}),
        ('target_prompt_logprobs.data', {'target_prompt_logprobs': dense([1, 1 << 64, 3], [3, 1])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': csr([1], [0, 1], [0], [3, 1])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': csr([1], [0, 0, 0, 1], [4], [3, 4])}),
        ('target_prompt_logprobs', {'target_prompt_logprobs': csr([], [0] * 4, [], [3, 1 << 30])}),
        ('prompt_alt_tokens_k', {'prompt_alt_tokens_k': -1}),
        ('prompt_alt_tokens_k', {'prompt_alt_tokens_k': 129}),
        ('prompt_alt_tokens_k', {'prompt_alt_tokens_k': 1.5}),
        ('prompt_alt_tokens_k', {'prompt_alt_tokens_k': True}),
    ],
)
def test_wrong_values_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    """A matrix with a wrong shape, type or content, or a wrong count, is refused with the path of its field."""
    body = {'prompt': {'chunks': [{'tokens': [3, 4, 5, 6]}]}, 'base_model': 'tiny', **fields}
    with pytest.raises(InvalidField) as refusal:
        sample_request(body)
    assert refusal.value.field == field


def test_drawn_tokens_are_limited_for_a_prompt() -> None:
    """The number of drawn tokens is limited for a prompt, and the refusal says how many are allowed at a position."""
    length = MAX_PROMPT_DRAWS // 100 + 1
    assert probe_from_json(None, 100, prompt_length=length) is not None
    with pytest.raises(InvalidField, match='must be at most 100 for a prompt') as refusal:
        probe_from_json(None, 101, prompt_length=length)
    assert refusal.value.field == 'prompt_alt_tokens_k'
