"""Questions about single tokens, between their messages and values."""

from collections.abc import Sequence

from services.kit.errors import InvalidField
from services.kit.rpc.fields import id_from_proto
from services.kit.rpc.tensors import tensor_from_proto
from services.sampler.domain.generation import TokenForm
from twinkle.api.sampler.v1 import sampler_service_pb2, sampling_pb2

MAX_DESCRIBED_TOKENS = 1 << 16


def tokens_from_proto(request: sampler_service_pb2.DescribeTokensRequest) -> tuple[str, tuple[int, ...]]:
    """Return the base model and the tokens that are asked about.

    Raises:
        InvalidField: names the field.
    """
    base_model = id_from_proto(request.base_model, 'base_model')
    token_ids = tensor_from_proto(request.token_ids, 'token_ids', dtypes=('int32',), dimensions=1)
    if not 1 <= len(token_ids) <= MAX_DESCRIBED_TOKENS:
        raise InvalidField('token_ids', f'must have 1 to {MAX_DESCRIBED_TOKENS} tokens, got {len(token_ids)}')
    return base_model, tuple(token_ids.tolist())


def forms_to_proto(forms: Sequence[TokenForm]) -> sampler_service_pb2.DescribeTokensResponse:
    """Return what the tokens stand for as a message."""
    return sampler_service_pb2.DescribeTokensResponse(
        tokens=[sampling_pb2.TokenForm(piece=form.piece, is_special=form.is_special) for form in forms]
    )
