"""The element type of a published version: as asked for, with a warning where something is lost."""

import numpy as np
import pytest

from services.kit.errors import InvalidField
from services.model.api.convert_verb import verb_from_proto
from services.model.application.state_verbs import as_published
from services.model.domain.engine import AdapterState
from services.model.domain.operation import PublishVersion
from twinkle.api.model.v1 import operation_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import LoraConfig, TensorData

STATE = AdapterState(
    lora_config=LoraConfig(r=1),
    adapter={'w': TensorData.from_numpy(np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8], np.float32))},
)


def _verb(**fields: object) -> object:
    message = operation_pb2.Operation(publish_version=operation_pb2.PublishVersion(**fields))  # type: ignore[arg-type]
    return verb_from_proto(message, 'operation', vocabulary_size=10)


def test_unset_type_is_the_trainers_own() -> None:
    """And the named ones are those that weights can be rounded to."""
    assert _verb() == PublishVersion()
    assert _verb(dtype=tensor_pb2.DTYPE_BFLOAT16, is_pinned=True) == PublishVersion(is_pinned=True, dtype='bfloat16')


@pytest.mark.parametrize('dtype', [tensor_pb2.DTYPE_INT64, tensor_pb2.DTYPE_FLOAT64, tensor_pb2.DTYPE_UNSPECIFIED])
def test_other_types_are_refused(dtype: tensor_pb2.Dtype.ValueType) -> None:
    """With the field's path."""
    with pytest.raises(InvalidField) as caught:
        _verb(dtype=dtype)
    assert caught.value.field == 'operation.publish_version.dtype'


async def test_narrower_weights_are_rounded_to_even_and_warned_of() -> None:
    """Ties go to the even neighbour; configuration and the rest stay."""
    state, warnings = await as_published(STATE, 'bfloat16')
    assert bytes(state.adapter['w'].data) == b'\x80\x3f\x80\x3f\x82\x3f'
    assert (state.adapter['w'].dtype, state.lora_config, len(warnings)) == ('bfloat16', STATE.lora_config, 1)


async def test_as_trained_there_is_nothing_to_warn_of() -> None:
    """Neither unset nor with the very type."""
    assert await as_published(STATE, None) == (STATE, ())
    assert (await as_published(STATE, 'float32'))[1] == ()


async def test_weights_that_do_not_fit_are_refused() -> None:
    """An infinite weight would be no rounding."""
    big = AdapterState(lora_config=LoraConfig(r=1), adapter={'w': TensorData.from_numpy(np.float32([1e9]))})
    with pytest.raises(InvalidField) as caught:
        await as_published(big, 'float16')
    assert caught.value.field == 'publish_version.dtype'
