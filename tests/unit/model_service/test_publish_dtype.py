"""The data type of published versions, and warnings about lost precision."""

import numpy as np
import pytest

from twinkle.api.model.v1 import operation_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import LoraConfig, TensorData
from twinkle_services.kit.errors import InvalidField
from twinkle_services.model.api.convert_verb import verb_from_proto
from twinkle_services.model.application.state_verbs import as_published
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.operation import PublishVersion

STATE = AdapterState(
    lora_config=LoraConfig(r=1),
    adapter={'w': TensorData.from_numpy(np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8], np.float32))},
)


def _verb(**fields: object) -> object:
    message = operation_pb2.Operation(publish_version=operation_pb2.PublishVersion(**fields))  # type: ignore[arg-type]
    return verb_from_proto(message, 'operation', vocabulary_size=10)


def test_unset_dtype_is_the_trainers() -> None:
    """An unset dtype selects the trainer's dtype, and bfloat16 is accepted."""
    assert _verb() == PublishVersion()
    assert _verb(dtype=tensor_pb2.DTYPE_BFLOAT16, is_pinned=True) == PublishVersion(is_pinned=True, dtype='bfloat16')


@pytest.mark.parametrize('dtype', [tensor_pb2.DTYPE_INT64, tensor_pb2.DTYPE_FLOAT64, tensor_pb2.DTYPE_UNSPECIFIED])
def test_other_types_are_refused(dtype: tensor_pb2.Dtype.ValueType) -> None:
    """An unsupported dtype is refused with the field's path."""
    with pytest.raises(InvalidField) as caught:
        _verb(dtype=dtype)
    assert caught.value.field == 'operation.publish_version.dtype'


async def test_narrower_weights_are_rounded_to_even_with_a_warning() -> None:
    """Weights are rounded to nearest even with a warning; the configuration is unchanged."""
    state, warnings = await as_published(STATE, 'bfloat16')
    assert bytes(state.adapter['w'].data) == b'\x80\x3f\x80\x3f\x82\x3f'
    assert (state.adapter['w'].dtype, state.lora_config, len(warnings)) == ('bfloat16', STATE.lora_config, 1)


async def test_dtype_of_the_trainer_gives_no_warning() -> None:
    """An unset dtype and the trainer's own dtype cause no warning."""
    assert await as_published(STATE, None) == (STATE, ())
    assert (await as_published(STATE, 'float32'))[1] == ()


async def test_weights_that_do_not_fit_are_refused() -> None:
    """A weight out of the range of the dtype is refused."""
    big = AdapterState(lora_config=LoraConfig(r=1), adapter={'w': TensorData.from_numpy(np.float32([1e9]))})
    with pytest.raises(InvalidField) as caught:
        await as_published(big, 'float16')
    assert caught.value.field == 'publish_version.dtype'
