"""Conversions of the Tinker API: arrays, batches, losses, paths, errors and compressed bodies."""

import math
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from twinkle.api.model.v1 import operation_result_pb2
from twinkle.loss import LOSSES as NATIVE_LOSSES
from twinkle_services.gateway.catalogue.paths import WeightsKind, WeightsPath, parse_name, parse_path, path_of_native
from twinkle_services.gateway.errors import FutureExpired, PayloadLost, PositionMissing, SessionFinished
from twinkle_services.gateway.http.body import parse_object
from twinkle_services.gateway.http.validation import read_model
from twinkle_services.gateway.tinker.arrays import (
    MAX_ELEMENTS,
    ElementBudget,
    array_from_json,
    array_from_proto,
    array_to_json,
)
from twinkle_services.gateway.tinker.bodies import decompressed_pieces
from twinkle_services.gateway.tinker.datums import LOSSES, loss_config, rule_of
from twinkle_services.gateway.tinker.models import CreateModelBody, native_lora_config
from twinkle_services.gateway.tinker.results import metrics_of, output_to_json, output_to_proto
from twinkle_services.gateway.tinker.routes import TinkerErrors, category_of, field_of, text_of
from twinkle_services.gateway.tinker.training import parse_message, request_from_json, request_from_proto
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import (
    Cancelled,
    CheckpointDamaged,
    Code,
    DeadlinePassed,
    DigestMismatch,
    DomainError,
    Internal,
    InvalidField,
    MessageTooLarge,
    QueueFull,
    QuotaExceeded,
    RequestIdReused,
    ServiceUnreachable,
    all_error_classes,
)
from twinkle_services.kit.rpc.tensors import tensor_to_proto

SHAPES = arrays.array_shapes(min_dims=1, max_dims=2, max_side=6)
FLOATS = arrays.arrays(np.float32, SHAPES, elements=st.floats(-1e6, 1e6, width=32))
INTEGERS = arrays.arrays(np.int64, SHAPES, elements=st.integers(-(1 << 40), 1 << 40))
TYPES = {'f': wire.DTYPE_FLOAT32, 'i': wire.DTYPE_INT64}


def tensor_of(array: np.ndarray) -> wire.Tensor:
    """Return the dense tensor that a client sends for an array."""
    data = array.astype(array.dtype.newbyteorder('<')).tobytes()
    return wire.Tensor(dense=data, dtype=TYPES[array.dtype.kind], shape=array.shape)


def sparse_of(array: np.ndarray) -> wire.Tensor:
    """Return the sparse tensor that a client sends for a matrix."""
    tensor = wire.Tensor(dtype=TYPES[array.dtype.kind], shape=array.shape)
    rows, columns = np.nonzero(array)
    starts = np.searchsorted(rows, np.arange(array.shape[0] + 1))
    tensor.sparse_csr.values = array[rows, columns].tobytes()
    tensor.sparse_csr.crow_indices = starts.astype('<i8').tobytes()
    tensor.sparse_csr.col_indices = columns.astype('<i8').tobytes()
    return tensor


@given(array=FLOATS | INTEGERS)
def test_array_survives_both_encodings(array: np.ndarray) -> None:
    """Bytes and JSON lists give the same array, with the same type and shape."""
    for read in (
        array_from_proto(tensor_of(array), 'x', ElementBudget()),
        array_from_json(array_to_json(array), 'x', ElementBudget()),
    ):
        np.testing.assert_array_equal(read, array)
        assert (read.shape, read.dtype.kind) == (array.shape, array.dtype.kind)


@given(array=(FLOATS | INTEGERS).filter(lambda array: array.ndim == 2))
def test_sparse_matrix_expands_to_the_dense_one(array: np.ndarray) -> None:
    """A sparse matrix expands with zeros for missing elements."""
    np.testing.assert_array_equal(array_from_proto(sparse_of(array), 'x', ElementBudget()), array)


def test_narrow_types_are_widened() -> None:
    """An int32 tensor and a bfloat16 tensor keep their values when they are widened."""
    integers = wire.Tensor(dense=np.array([-1, 2], '<i4').tobytes(), dtype=wire.DTYPE_INT32)
    halves = wire.Tensor(dense=np.array([0x3F80, 0xC000], '<u2').tobytes(), dtype=wire.DTYPE_BFLOAT16)
    assert array_from_proto(integers, 'x', ElementBudget()).tolist() == [-1, 2]
    assert array_from_proto(halves, 'x', ElementBudget()).tolist() == [1.0, -2.0]


@pytest.mark.parametrize(
    'tensor',
    [
        wire.Tensor(),
        wire.Tensor(dtype=wire.DTYPE_FLOAT32),
        wire.Tensor(dense=b'123', dtype=wire.DTYPE_FLOAT32),
        wire.Tensor(dense=b'1234', dtype=wire.DTYPE_FLOAT32, shape=[2]),
        wire.Tensor(dense=b'1234', dtype=wire.DTYPE_FLOAT32, shape=[-1, -1]),
        wire.Tensor(dense=b'', dtype=wire.DTYPE_FLOAT32, shape=[1 << 62, 4]),
        wire.Tensor(sparse_csr=wire.SparseCsr(), dtype=wire.DTYPE_FLOAT32),
        wire.Tensor(sparse_csr=wire.SparseCsr(), dtype=wire.DTYPE_FLOAT32, shape=[0, 0]),
        wire.Tensor(sparse_csr=wire.SparseCsr(), dtype=wire.DTYPE_FLOAT32, shape=[1 << 40, 1 << 40]),
        wire.Tensor(
            sparse_csr=wire.SparseCsr(
                values=b'1234',
                crow_indices=np.array([0, 1], '<i8').tobytes(),
                col_indices=np.array([5], '<i8').tobytes(),
            ),
            dtype=wire.DTYPE_FLOAT32,
            shape=[1, 5],
        ),
        wire.Tensor(
            sparse_csr=wire.SparseCsr(crow_indices=np.array([0, 9, 0], '<i8').tobytes()),
            dtype=wire.DTYPE_FLOAT32,
            shape=[2, 2],
        ),
    ],
)
def test_inconsistent_tensor_is_refused(tensor: wire.Tensor) -> None:
    """A tensor with inconsistent type, shape or bytes is refused."""
    with pytest.raises(InvalidField):
        array_from_proto(tensor, 'data[0].loss_fn_inputs.weights', ElementBudget())


def test_sparse_arrays_share_one_budget() -> None:
    """All sparse arrays of a request share one budget of elements, and an array beyond the budget is refused."""
    rows = MAX_ELEMENTS // 2
    tensor = wire.Tensor(
        sparse_csr=wire.SparseCsr(crow_indices=bytes(8 * (rows + 1))), dtype=wire.DTYPE_FLOAT32, shape=[rows, 1]
    )
    budget = ElementBudget()
    array_from_proto(tensor, 'x', budget)
    array_from_proto(tensor, 'x', budget)
    with pytest.raises(InvalidField):
        array_from_proto(tensor, 'x', budget)


def decompressed(data: bytes, *, limit_bytes: int) -> bytes:
    """Return the decompressed body."""
    return b''.join(decompressed_pieces(data, limit_bytes=limit_bytes))


@given(data=st.binary(max_size=200))
def test_random_bytes_are_a_request_or_are_refused(data: bytes) -> None:
    """Random bytes are a valid request, or raise InvalidField or MessageTooLarge."""
    for read in (
        lambda: request_from_proto(parse_message(data)),
        lambda: request_from_json(parse_object(data), is_forward_only=False),
        lambda: decompressed(data, limit_bytes=1000),
    ):
        with suppress(InvalidField, MessageTooLarge):
            read()


@given(data=st.binary(max_size=3000), limit=st.integers(0, 3000))
def test_compressed_body_is_restored_or_too_long(data: bytes, limit: int) -> None:
    """A compressed body is restored with or without a declared length, and a truncated body is refused."""
    frame = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    for body in (zstandard.compress(data), frame.compress(data) + frame.flush()):
        if len(data) > limit:
            with pytest.raises(MessageTooLarge):
                decompressed(body, limit_bytes=limit)
            continue
        assert decompressed(body, limit_bytes=limit) == data
        with pytest.raises((InvalidField, MessageTooLarge)):
            decompressed(body[:-1], limit_bytes=limit)


def test_decompression_bomb_is_refused() -> None:
    """A decompression bomb is refused as too large."""
    frame = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 22)
    body = b''.join([*(frame.compress(zeros) for _ in range(64)), frame.flush()])
    assert len(body) < 1 << 16
    with pytest.raises(MessageTooLarge):
        decompressed(body, limit_bytes=1 << 20)


def test_outputs_of_different_widths_are_separate_records() -> None:
    """Outputs with different trailing dimensions are separate records in order, with offsets in bytes."""
    result = operation_result_pb2.ForwardResult(loss=2.0, label_count=7)
    shapes = [(2,), (1,), (2, 3), (1,)]
    for shape in shapes:
        result.logprobs.append(tensor_to_proto(np.ones(shape, np.float32)))
    output = output_to_proto(result)
    assert [record.num_datums for record in output.loss_fn_outputs] == [2, 1, 1]
    offsets = [np.frombuffer(r.fields['logprobs'].offsets, '<i8').tolist() for r in output.loss_fn_outputs]
    assert offsets == [[0, 8, 12], [0, 24], [0, 4]]
    assert [item['logprobs']['shape'] for item in output_to_json(result)['loss_fn_outputs']] == [
        list(s) for s in shapes
    ]


def test_metrics_have_one_reduction_each() -> None:
    """Each metric has one reduction, and JSON omits numbers that are not finite."""
    result = operation_result_pb2.ForwardResult(loss=1.0)
    result.metrics.update({'kl:sum': 2.0, 'ratio': 0.5, 'a:b:c': 1.0, 'bad': float('nan')})
    assert math.isnan(metrics_of(result)['bad:mean'])
    metrics = output_to_json(result)['metrics']
    assert metrics == {'loss:sum': 1.0, 'num_tokens:sum': 0.0, 'kl:sum': 2.0, 'ratio:mean': 0.5, 'a_b_c:mean': 1.0}


def test_every_loss_is_known_to_the_trainer() -> None:
    """Every supported loss name is a loss of the trainer."""
    assert set(LOSSES) <= set(NATIVE_LOSSES.names)


@pytest.mark.parametrize(
    ('name', 'config'),
    [
        ('ppo', {'beta': 1.0}),
        ('dro', {'beta': 'x'}),
        ('dro', {'beta': float('nan')}),
        ('ppo', {'clip_low_threshold': 2.0, 'clip_high_threshold': 1.0}),
        ('cross_entropy', {'x': 1.0}),
    ],
)
def test_invalid_option_of_a_loss_is_refused(name: str, config: dict[str, float | str]) -> None:
    """An unknown or invalid option of a loss is refused."""
    with pytest.raises(InvalidField):
        loss_config(name, config, is_wide=False)


def test_only_cross_entropy_accepts_several_targets() -> None:
    """Only cross-entropy accepts several targets for each position."""
    assert loss_config('cross_entropy', {}, is_wide=True).name == 'cross_entropy'
    with pytest.raises(InvalidField):
        loss_config('ppo', {}, is_wide=True)
    with pytest.raises(InvalidField):
        rule_of('nope')


@given(name=st.from_regex(r'[A-Za-z0-9._-]{1,40}', fullmatch=True), kind=st.sampled_from(WeightsKind))
def test_path_survives_a_round_trip(name: str, kind: WeightsKind) -> None:
    """A Tinker path is unchanged after conversion to the native form and back, so different paths stay different."""
    path = WeightsPath('ses-1:train:0', kind, name)
    try:
        parse_name(name, 'path')
    except InvalidField:
        assert name.endswith(('.sampler', '.external'))
        return
    assert parse_path(str(path), 'path') == path
    assert path_of_native(path.native) == path


@pytest.mark.parametrize(
    'text',
    ['', 'tinker://', 'tinker://a/weights', 'tinker://a/weights/b/c', 'twinkle://a/weights/b', 'tinker://a/b/c',
     'tinker://../weights/x', 'tinker://a/weights/..%2f', 'tinker://a/weights/x y', 'tinker://a/weights/ü',
     'tinker://a/weights/' + 'x' * 120, 'tinker://a/weights/x.sampler'],
)  # fmt: skip
def test_invalid_path_is_refused(text: str) -> None:
    """A path needs three parts, a known kind and a valid name."""
    with pytest.raises(InvalidField):
        parse_path(text, 'path')


@pytest.mark.parametrize(
    ('error', 'status', 'category'),
    [
        (InvalidField('x', 'y'), 400, 'user'),
        (RequestIdReused('x'), 400, 'user'),
        (SessionFinished('x'), 410, 'user'),
        (FutureExpired('x'), 410, 'user'),
        (MessageTooLarge(size_bytes=2, limit_bytes=1), 413, 'user'),
        (QuotaExceeded(quota='adapters', limit=1), 400, 'user'),
        (QueueFull(queue_length=1, queue_limit=1), 429, 'user'),
        (ServiceUnreachable('model'), 503, 'server'),
        (DeadlinePassed(), 408, 'server'),
        (Internal('rq-1'), 500, 'server'),
        (Cancelled(), 400, 'unknown'),
        (CheckpointDamaged('ad-1/weights/best'), 400, 'user'),
        (PayloadLost('fu-1'), 400, 'user'),
        (DigestMismatch('a', 'b'), 500, 'server'),
    ],
)
def test_errors_have_status_and_category(error: DomainError, status: int, category: str) -> None:
    """Errors map to a status that tells clients whether to retry, and to a category."""
    assert (TinkerErrors().status_of(error), category_of(error)) == (status, category)
    assert TinkerErrors().body_of(error, request_id='rq')['detail'] == text_of(error) != ''


def test_permanent_errors_are_not_retried() -> None:
    """Only errors that a retry can resolve get a status on which the SDK retries."""
    retryable = {Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.INTERNAL}
    for error_class in all_error_classes():
        error = error_class.__new__(error_class)
        code = getattr(error_class, 'code', None)
        is_transient_loss = code is Code.DATA_LOSS and error.disposition.is_transient
        if code is None or code in retryable or is_transient_loss:
            continue
        assert TinkerErrors().status_of(error) in {400, 401, 403, 404, 410, 413}, error_class.reason


def test_missing_position_is_not_a_server_error() -> None:
    """A missing position is a failed precondition and not a server error."""
    assert PositionMissing.code is Code.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ('native', 'expected'),
    [
        ('operation.forward_backward.batch.features[3].old_logps', 'data[3].logprobs'),
        ('operation.forward_only.loss.options.beta', 'loss_fn.options.beta'),
        ("operation.forward_backward.batch.features[0].extra_tensors['target_ids']", 'data[0].target_tokens'),
        ('operation.save.name', 'path'),
        ('lora_config.lora_rank', 'lora_config.rank'),
        ('somewhere.else', 'somewhere.else'),
    ],
)
def test_errors_use_tinkers_field_names(native: str, expected: str) -> None:
    """Errors name the fields of Tinker's requests instead of native fields."""
    assert field_of(native) == expected


@pytest.mark.parametrize(
    ('lora', 'is_unembed_trained', 'groups'),
    [
        ({}, True, ['all-attention', 'all-mlp', 'output-head']),
        ({}, False, ['all-attention', 'all-mlp']),
        ({'train_attn': False, 'train_mlp': False}, True, ['output-head']),
        ({'train_unembed': False, 'train_mlp': False}, True, ['all-attention']),
    ],
)
def test_switches_choose_groups_of_layers(
    lora: dict[str, bool], *, is_unembed_trained: bool, groups: list[str]
) -> None:
    """The train switches select groups of layers; the output head also needs the option of the operator."""
    body = {'session_id': 's', 'model_seq_id': 0, 'base_model': 'tiny', 'lora_config': lora}
    parsed = read_model(CreateModelBody, body)
    config = native_lora_config(parsed.lora_config, is_unembed_trained=is_unembed_trained)
    assert list(config.target_modules) == groups
