"""Sampling parameters arrive in the sampler unchanged, from the client through the contract."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import PromptProbe, SamplingParams, StructuredOutput
from twinkle.data_format.prompt_probe import MAX_DRAWS, MAX_TARGET_ELEMENTS, MAX_TARGETS
from twinkle_client import convert
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.tensors import tensor_to_proto
from twinkle_services.sampler.api.convert import sample_from_proto
from twinkle_services.sampler.api.convert_params import (
    MAX_CHOICES,
    MAX_FORM_LENGTH,
    MAX_REGEX_LENGTH,
    params_from_proto,
)

SCHEMA = {'type': 'object', 'properties': {'n': {'type': 'integer', 'minimum': 0}}, 'required': ['n']}
FORMS = (
    StructuredOutput(json_schema=SCHEMA),
    StructuredOutput(json_object=True),
    StructuredOutput(regex='[a-z]+'),
    StructuredOutput(choices=('yes', 'no')),
    StructuredOutput(grammar='root ::= "a"'),
)


def bounded(minimum: float, maximum: float) -> st.SearchStrategy[float]:
    """Return a strategy for finite numbers within bounds."""
    return st.floats(minimum, maximum, allow_nan=False)


@given(
    params=st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(0, 100),
        seed=st.none() | st.integers(-(2**62), 2**62),
        temperature=bounded(0, 3),
        top_k=st.just(-1) | st.integers(1, 50),
        top_p=bounded(0.01, 1),
        min_p=bounded(0, 1),
        repetition_penalty=bounded(0.5, 2),
        presence_penalty=bounded(-2, 2),
        frequency_penalty=bounded(-2, 2),
        num_samples=st.integers(1, 8),
        ignore_eos=st.booleans(),
        structured_output=st.none() | st.sampled_from(FORMS),
    )
)
def test_parameters_are_converted_unchanged(params):
    """Every field arrives with the client's value, and unset fields with their defaults."""
    arrived = params_from_proto(convert.sampling_params(params))
    assert arrived == SamplingParams(**{**vars(params), 'logprobs': 0, 'stop': ()})


def test_probe_is_converted_unchanged():
    """The tokens and the count of a probe arrive with the client's values; unset tokens remain unset."""
    targets = np.array([[1, -1], [3, 4]], np.int32)
    arrived = params_from_proto(
        convert.sampling_params(SamplingParams(prompt_probe=PromptProbe(target_token_ids=targets, draw_count=2)))
    )
    np.testing.assert_array_equal(arrived.prompt_probe.target_token_ids, targets)
    assert arrived.prompt_probe.draw_count == 2
    drawn = params_from_proto(convert.sampling_params({'prompt_probe': PromptProbe(draw_count=1)})).prompt_probe
    assert (drawn.target_token_ids, drawn.draw_count) == (None, 1)


def probe_of(array=None, draw_count=0):
    """Return a PromptProbe message with the given values."""
    targets = None if array is None else tensor_to_proto(np.asarray(array))
    return sampling_pb2.PromptProbe(target_token_ids=targets, draw_count=draw_count)


@pytest.mark.parametrize(
    ('fields', 'path'),
    [
        ({'prompt_probe': probe_of(draw_count=-1)}, 'params.prompt_probe.draw_count'),
        ({'prompt_probe': probe_of(draw_count=MAX_DRAWS + 1)}, 'params.prompt_probe.draw_count'),
        ({'prompt_probe': probe_of(np.zeros(3, np.int32))}, 'params.prompt_probe.target_token_ids.shape'),
        ({'prompt_probe': probe_of(np.zeros((3, 1), np.int64))}, 'params.prompt_probe.target_token_ids.dtype'),
        ({'prompt_probe': probe_of(np.zeros((3, 0), np.int32))}, 'params.prompt_probe.target_token_ids'),
        (
            {'prompt_probe': probe_of(np.zeros((3, MAX_TARGETS + 1), np.int32))},
            'params.prompt_probe.target_token_ids',
        ),
        (
            {'prompt_probe': probe_of(np.zeros((MAX_TARGET_ELEMENTS // 64 + 1, 64), np.int32))},
            'params.prompt_probe.target_token_ids',
        ),
        ({'min_p': 1.5}, 'params.min_p'),
        ({'presence_penalty': 2.5}, 'params.presence_penalty'),
        ({'frequency_penalty': -3.0}, 'params.frequency_penalty'),
        ({'frequency_penalty': float('nan')}, 'params.frequency_penalty'),
        ({'structured_output': sampling_pb2.StructuredOutput()}, 'params.structured_output'),
        ({'structured_output': sampling_pb2.StructuredOutput(is_json_object=False)}, 'params.structured_output'),
        ({'structured_output': sampling_pb2.StructuredOutput(regex='')}, 'params.structured_output'),
        (
            {'structured_output': sampling_pb2.StructuredOutput(grammar='x' * MAX_FORM_LENGTH)},
            'params.structured_output',
        ),
        (
            {'structured_output': sampling_pb2.StructuredOutput(regex='x' * (MAX_REGEX_LENGTH + 1))},
            'params.structured_output.regex',
        ),
        (
            {'structured_output': sampling_pb2.StructuredOutput(choices=sampling_pb2.TextChoices(texts=['a', '']))},
            'params.structured_output.choices.texts[1]',
        ),
        (
            {
                'structured_output': sampling_pb2.StructuredOutput(
                    choices=sampling_pb2.TextChoices(texts=['a'] * (MAX_CHOICES + 1))
                )
            },
            'params.structured_output.choices.texts',
        ),
    ],
)
def test_values_out_of_range_are_named(fields, path):
    """The error for a parameter out of range has its field path."""
    with pytest.raises(InvalidField) as caught:
        params_from_proto(sampling_pb2.SamplingParams(**fields))
    assert caught.value.field == path


def test_forms_may_be_given_as_mappings():
    """A dict that describes structured output is converted, and mistakes in the dict are refused."""
    params = SamplingParams.from_dict({'structured_output': {'choices': ['a', 'b']}})
    assert params.structured_output == StructuredOutput(choices=('a', 'b'))
    for invalid in ({'regexp': 'a'}, {}, {'regex': 'a', 'grammar': 'b'}):
        with pytest.raises(ValueError, match='structured_output'):
            SamplingParams.from_dict({'structured_output': invalid})


def request(*entries: sampler_service_pb2.SequenceSoFar) -> sampler_service_pb2.SampleRequest:
    """Return a request for two sequences that continues `entries`."""
    tokens = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[1], data=bytes(4))
    return sampler_service_pb2.SampleRequest(
        base_model='tiny',
        prompt=sampling_pb2.Prompt(token_ids=tokens),
        params=sampling_pb2.SamplingParams(sample_count=2),
        continued=entries,
    )


def test_delivered_sequences_are_in_order():
    """A continuation has one entry per sequence, in order; an entry may have no tokens."""
    token = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[1], data=(7).to_bytes(4, 'little'))
    first = sampler_service_pb2.SequenceSoFar(token_ids=token)
    second = sampler_service_pb2.SequenceSoFar(sequence_index=1, is_finished=True)
    converted = sample_from_proto(request(first, second))
    assert [(one.token_ids, one.is_finished) for one in converted.continued] == [((7,), False), ((), True)]
    assert sample_from_proto(request()).continued == ()
    for entries, path in (((first,), 'continued'), ((second, first), 'continued[0].sequence_index')):
        with pytest.raises(InvalidField) as caught:
            sample_from_proto(request(*entries))
        assert caught.value.field == path
