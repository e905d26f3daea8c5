"""The three faces of an error agree: the class, the reason in the contract, the status code beside it."""

import pickle
import re
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from services.kit.errors import DomainError, all_error_classes
from services.kit.rpc.status import error_from_status, status_from_error
from twinkle.api.error.v1 import error_reason_pb2

ROOT = Path(__file__).parents[3]


def _load_every_error() -> list[type[DomainError]]:
    for path in sorted((ROOT / 'services').glob('*/domain/errors.py')):
        import_module('.'.join(path.relative_to(ROOT).with_suffix('').parts))
    return all_error_classes()


def _codes_in_contract() -> dict[str, str]:
    text = (ROOT / 'protos/twinkle/api/error/v1/error_reason.proto').read_text(encoding='utf-8')
    pattern = re.compile(r'^  // ([A-Z_]+)\b[^\n]*\n(?:  //[^\n]*\n)*  ERROR_REASON_([A-Z_]+) = ', re.MULTILINE)
    return {reason: code for code, reason in pattern.findall(text)}


def _example(error_class: type[DomainError]) -> DomainError:
    samples: dict[Any, Any] = {str: 'x', int: 3, tuple[str, ...]: ('x', 'y'), float: 0.5}
    types = get_type_hints(error_class)
    values = {item.name: samples[types[item.name]] for item in fields(error_class)}
    return error_class(**values)


CLASSES = [item for item in _load_every_error() if not item.__module__.endswith('.status')]
EXAMPLES = [pytest.param(_example, error_class, id=error_class.__name__) for error_class in CLASSES]


def test_every_reason_has_its_code_in_the_contract() -> None:
    """No class has a reason the contract lacks, or another code than the contract tells."""
    codes = _codes_in_contract()
    for error_class in CLASSES:
        assert codes[error_class.reason] == error_class.code.name, error_class


def test_contract_tells_a_code_for_every_reason() -> None:
    """The comment of each reason begins with its status code."""
    reasons = {name.removeprefix('ERROR_REASON_') for name in error_reason_pb2.ErrorReason.keys()}  # noqa: SIM118
    assert reasons - {'UNSPECIFIED'} == set(_codes_in_contract())


@pytest.mark.parametrize(('build', 'error_class'), EXAMPLES)
def test_error_survives_pickling(build: Any, error_class: type[DomainError]) -> None:
    """An error crosses a process boundary with its facts."""
    error = build(error_class)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is error_class
    assert (str(copy), copy.metadata(), copy.violations) == (str(error), error.metadata(), error.violations)


@pytest.mark.parametrize(('build', 'error_class'), EXAMPLES)
def test_error_survives_the_wire(build: Any, error_class: type[DomainError]) -> None:
    """Code, reason, metadata, fields and retry time come back from a status as they went in."""
    error = build(error_class)
    back = error_from_status(status_from_error(error))
    assert (back.code, back.reason, str(back)) == (error.code, error.reason, str(error))
    assert (back.metadata(), back.violations, back.retry_after) == (
        dict(error.metadata()),
        error.violations,
        error.retry_after,
    )
