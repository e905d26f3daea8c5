"""Lists in the comments of the contracts equal the values that the code accepts."""

import re
from pathlib import Path

from services.kit.errors import Code, DomainError
from services.model.domain.refusal import is_refusal
from twinkle.data_format.streams import EXTRA_STREAMS

PROTOS = Path(__file__).parents[3] / 'protos/twinkle/api'


def _comment(file: str, field: str) -> str:
    """Return the lines of comment above a field."""
    text = (PROTOS / file).read_text()
    found = re.search(rf'((?: *//.*\n)+) *{re.escape(field)}', text)
    assert found is not None, f'{field} has no comment in {file}'
    return found.group(1)


def test_every_stream_is_named_where_it_travels() -> None:
    """A caller learns each name of `extra_tensors` from the contract, and no name that is refused."""
    comment = _comment('data/v1/input_feature.proto', 'map<string, twinkle.api.tensor.v1.Tensor> extra_tensors')
    assert set(re.findall(r'"(\w+)"', comment)) == set(EXTRA_STREAMS)


def test_the_codes_that_free_a_number_are_told() -> None:
    """A client that follows the comment keeps in step with the service."""
    comment = _comment('model/v1/operation.proto', 'int64 sequence_number')
    freed = {code.name for code in Code if is_refusal(_error_of(code))}
    assert set(re.findall(r'\b[A-Z][A-Z_]{5,}\b', comment)) - {'ABORTED', 'ERROR_REASON_SEQUENCE_REUSED'} == freed


def _error_of(code: Code) -> DomainError:
    return type(code.name, (DomainError,), {'code': code, 'reason': code.name})()
