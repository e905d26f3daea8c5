"""Tests that lists in the comments of the contracts equal the values that the code uses."""

import re
from pathlib import Path

from twinkle.data_format.streams import EXTRA_STREAMS
from twinkle_services.kit.errors import Code, DomainError
from twinkle_services.model.domain.sequence import is_refusal, outcome_disposition

PROTOS = Path(__file__).parents[3] / 'protos/twinkle/api'


def _comment(file: str, field: str) -> str:
    """Return the comment above a field."""
    text = (PROTOS / file).read_text()
    found = re.search(rf'((?: *//.*\n)+) *{re.escape(field)}', text)
    assert found is not None, f'{field} has no comment in {file}'
    return found.group(1)


def test_comment_lists_every_extra_tensor() -> None:
    """The comment of `extra_tensors` lists exactly the accepted names."""
    comment = _comment('data/v1/input_feature.proto', 'map<string, twinkle.api.tensor.v1.Tensor> extra_tensors')
    assert set(re.findall(r'"(\w+)"', comment)) == set(EXTRA_STREAMS)


def test_comment_lists_the_dispositions_after_which_a_number_is_reusable() -> None:
    """The comment of `sequence_number` lists exactly the dispositions of errors after which a number is free."""
    comment = _comment('model/v1/operation.proto', 'int64 sequence_number')
    listed = set(re.findall(r'\b[A-Z][A-Z_]{5,}\b', comment)) - {'ABORTED', 'ERROR_REASON_SEQUENCE_REUSED'}
    errors = [_error_of(code) for code in Code]
    assert listed == {outcome_disposition(error).value for error in errors if is_refusal(error)}
    assert not listed & {outcome_disposition(error).value for error in errors if not is_refusal(error)}


def _error_of(code: Code) -> DomainError:
    return type(code.name, (DomainError,), {'code': code, 'reason': code.name})()
