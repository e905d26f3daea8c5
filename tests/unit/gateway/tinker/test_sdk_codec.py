"""Conversion of bodies that the Tinker SDK writes and reads."""

import numpy as np
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from twinkle.api.model.v1 import operation_result_pb2
from twinkle_services.gateway.tinker.results import output_to_proto
from twinkle_services.gateway.tinker.training import parse_message, request_from_proto
from twinkle_services.kit.rpc.tensors import tensor_to_proto

TOKENS = st.lists(st.integers(0, 50_000), min_size=1, max_size=12)
NUMBERS = st.floats(-1e4, 1e4, width=32)


@st.composite
def datums(draw: st.DrawFn) -> tinker.Datum:
    """Generate an example with targets and weights; its input may be split into two chunks."""
    tokens = draw(TOKENS)
    cut = draw(st.integers(0, len(tokens)))
    chunks = [tinker.EncodedTextChunk(tokens=part) for part in (tokens[:cut], tokens[cut:]) if part]
    numbers = draw(st.lists(NUMBERS, min_size=len(tokens), max_size=len(tokens)))
    return tinker.Datum(
        model_input=tinker.ModelInput(chunks=chunks),
        loss_fn_inputs={
            'target_tokens': tinker.TensorData(data=tokens, dtype='int64', shape=[len(tokens)]),
            'weights': tinker.TensorData(data=numbers, dtype='float32', shape=[len(tokens)]),
        },
    )


@given(data=st.lists(datums(), min_size=1, max_size=4), beta=NUMBERS)
def test_request_of_the_sdk_is_converted(data: list[tinker.Datum], beta: float) -> None:
    """A request of the SDK keeps its tokens, arrays and loss options."""
    given_input = ForwardBackwardInput(data=data, loss_fn='dro', loss_fn_config={'beta': beta})
    request = ForwardBackwardRequest(forward_backward_input=given_input, model_id='ses:train:0', seq_id=3)
    read = request_from_proto(parse_message(forward_backward_request_to_proto(request).SerializeToString()))
    assert (read.model_id, read.seq_id, read.loss_fn, read.config) == ('ses:train:0', 3, 'dro', {'beta': beta})
    assert [datum.tokens.tolist() for datum in read.datums] == [datum.model_input.to_ints() for datum in data]
    for datum, expected in zip(read.datums, data, strict=True):
        for name, array in datum.inputs.items():
            np.testing.assert_array_equal(array, expected.loss_fn_inputs[name].to_numpy())


@given(shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=6))
def test_sdk_reads_the_output(shapes: list[tuple[int, int]]) -> None:
    """The SDK reads arrays of any shape in order, and the metrics."""
    result = operation_result_pb2.ForwardResult(loss=-2.5, label_count=7)
    arrays = [
        np.random.default_rng(index).normal(size=(length, width) if width else length).astype(np.float32)
        for index, (length, width) in enumerate(shapes)
    ]
    result.logprobs.extend(tensor_to_proto(array) for array in arrays)
    read = deserialize_forward_backward_output(output_to_proto(result).SerializeToString())
    assert read.metrics == {'loss:sum': -2.5, 'num_tokens:sum': 7.0}
    assert len(read.loss_fn_outputs) == len(arrays)
    for output, array in zip(read.loss_fn_outputs, arrays, strict=True):
        np.testing.assert_array_equal(output['logprobs'].to_numpy(), array)
