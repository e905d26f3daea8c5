"""The error table: each domain error has a reason of the contract, with the documented code and metadata."""

import ast
import importlib
import pickle
import re
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from fixtures.source_tree import ROOT, modules
from twinkle_services.kit.errors import (
    BytesFull,
    Code,
    Disposition,
    DomainError,
    FieldViolation,
    QueueFull,
    all_error_classes,
)
from twinkle_services.kit.rpc.status import error_from_status, status_from_error

CONTRACT = ROOT / 'protos' / 'twinkle' / 'api' / 'error' / 'v1' / 'error_reason.proto'
NOT_RAISED_YET: set[str] = set()
"""Reasons of the contract that no class uses yet; this set only shrinks."""

for _module in modules('services/'):
    if re.fullmatch(r'twinkle_services\.\w+(\.domain)?\.errors(\.\w+)?', _module.name):
        importlib.import_module(_module.name)
ERRORS = all_error_classes()


def test_contract_and_classes_name_the_same_reasons() -> None:
    """Every reason of the contract has a class, and every class has a reason of the contract."""
    assert {error.reason for error in ERRORS} | NOT_RAISED_YET == set(_contract())
    assert {error.reason for error in ERRORS} & NOT_RAISED_YET == set()


@pytest.mark.parametrize('error', ERRORS, ids=lambda error: error.__name__)
def test_error_matches_the_contract(error: type[DomainError]) -> None:
    """The status code and the metadata keys of a class are those that the contract documents."""
    comment = _contract()[error.reason]
    instance = _example(error)
    assert comment.startswith(error.code.name)
    assert [key for key in instance.metadata() if not re.search(rf'\b{key}\b', comment)] == []


def test_errors_of_full_queues_differ_in_their_metadata() -> None:
    """The errors of full queues share one reason; their metadata names the counted quantity."""
    assert QueueFull(1, 2).metadata() == {'queueLength': '1', 'queueLimit': '2'}
    assert BytesFull(1, 2).metadata() == {'bytesInFlight': '1', 'bytesLimit': '2'}


@pytest.mark.parametrize('error', ERRORS, ids=lambda error: error.__name__)
def test_error_can_be_pickled(error: type[DomainError]) -> None:
    """Pickling preserves the class, the message and the attributes."""
    instance = _example(error)
    copy = pickle.loads(pickle.dumps(instance))
    assert type(copy) is error
    assert str(copy) == str(instance) != ''
    assert copy.metadata() == instance.metadata()
    assert copy.violations == instance.violations


@pytest.mark.parametrize('error', ERRORS, ids=lambda error: error.__name__)
def test_error_can_be_converted_to_a_status_and_back(error: type[DomainError]) -> None:
    """Code, reason, metadata, fields and retry time are preserved when an error is converted to a status and back."""
    instance = _example(error)
    status = status_from_error(instance)
    back = error_from_status(status)
    # Forwarding keeps every detail.
    assert [detail.TypeName() for detail in status_from_error(back).details] == [
        detail.TypeName() for detail in status.details
    ]
    assert (back.code, back.reason, str(back)) == (instance.code, instance.reason, str(instance))
    assert (back.metadata(), back.violations) == (dict(instance.metadata()), instance.violations)
    assert back.retry_after == instance.retry_after


DECLARED = {
    'CHECKPOINT_DAMAGED': Disposition.REFUSED,
    'STORED_DATA_DAMAGED': Disposition.REFUSED,
    'CHUNK_CORRUPT': Disposition.INTERRUPTED,
    'DIGEST_MISMATCH': Disposition.INTERRUPTED,
    'DISK_FULL': Disposition.RETRYABLE,
    'DRAINING': Disposition.RETRYABLE,
    'ENGINE_PAUSED': Disposition.RETRYABLE,
    'EXPORT_UNAVAILABLE': Disposition.RETRYABLE,
    'FULL_PARAMETERS_DISABLED': Disposition.REFUSED,
    'JOURNAL_UNAVAILABLE': Disposition.RETRYABLE,
    'NO_REPLICA': Disposition.RETRYABLE,
    'REPLICA_IN_USE': Disposition.REFUSED,
    'REPLICA_LEASED': Disposition.REFUSED,
    'REQUEST_ID_REUSED': Disposition.REFUSED,
    'SEQUENCE_GAP': Disposition.UNKNOWN,
    'STORE_UNAVAILABLE': Disposition.RETRYABLE,
    'VERSION_NOT_READY': Disposition.RETRYABLE,
}
"""Dispositions by reason, if they differ from the disposition of the status code."""
UNREACHED = {'ReplicaNotReached': Disposition.RETRYABLE}
"""Dispositions by class, if they differ from the disposition of the reason."""
BY_CODE = {
    Code.DEADLINE_EXCEEDED: Disposition.INTERRUPTED,
    Code.FAILED_PRECONDITION: Disposition.FAILED,
    Code.UNAVAILABLE: Disposition.INTERRUPTED,
    **dict.fromkeys((Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.ALREADY_EXISTS), Disposition.REFUSED),
    **dict.fromkeys((Code.PERMISSION_DENIED, Code.UNAUTHENTICATED, Code.UNIMPLEMENTED), Disposition.REFUSED),
    **dict.fromkeys((Code.ABORTED, Code.CANCELLED, Code.DATA_LOSS, Code.INTERNAL), Disposition.UNKNOWN),
}
"""Dispositions by status code; the disposition of RESOURCE_EXHAUSTED depends on the retry time."""


@pytest.mark.parametrize('error', ERRORS, ids=lambda error: f'{error.__module__}.{error.__name__}')
def test_error_has_the_disposition_of_its_declaration_or_code(error: type[DomainError]) -> None:
    """An error has the disposition that it declares, or else the disposition of its status code."""
    instance = _example(error)
    if error.code is Code.RESOURCE_EXHAUSTED:
        expected = Disposition.REFUSED if instance.retry_after is None else Disposition.RETRYABLE
    else:
        expected = UNREACHED.get(error.__name__) or DECLARED.get(error.reason) or BY_CODE[error.code]
    assert instance.disposition is expected
    assert error_from_status(status_from_error(instance)).disposition is expected
    assert pickle.loads(pickle.dumps(instance)).disposition is expected


def test_disposition_of_one_error_can_be_replaced() -> None:
    """A disposition that is set on one error survives transport and pickling, and does not affect other errors."""
    error = QueueFull(1, 2)
    error.disposition = Disposition.FAILED
    assert QueueFull(1, 2).disposition is Disposition.RETRYABLE
    assert error_from_status(status_from_error(error)).disposition is Disposition.FAILED
    assert pickle.loads(pickle.dumps(error)).disposition is Disposition.FAILED


def test_quotas_have_names_that_programs_can_use() -> None:
    """Quota names in the metadata are the snake_case names of the fields that set them."""
    calls = [
        call
        for module in modules('services/')
        for call in ast.walk(module.tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {'QuotaExceeded', 'UploadQuota'}
    ]
    names = [
        ast.unparse((call.args or [item.value for item in call.keywords if item.arg == 'quota'])[0]) for call in calls
    ]
    assert [name for name in names if not re.fullmatch(r"[A-Z]+|quota\.name|'[a-z]+(_[a-z]+)*'", name)] == []
    assert len(names) > 10


def _contract() -> dict[str, str]:
    """Return the comment of each reason, joined to one line."""
    found = re.findall(r'((?:^ *//.*\n)+) *ERROR_REASON_(\w+) = [1-9]', CONTRACT.read_text(), re.MULTILINE)
    return {reason: ' '.join(re.findall(r'// ?(.*)', comment)) for comment, reason in found}


def _example(error: type[DomainError]) -> DomainError:
    hints = get_type_hints(error)
    return error(**{item.name: _value(hints[item.name]) for item in fields(error)})


def _value(hint: Any) -> object:
    if isinstance(hint, UnionType):
        return _value(get_args(hint)[0])
    if get_origin(hint) is tuple:
        is_violation = get_args(hint)[0] is FieldViolation
        return (FieldViolation('batch.features[0]', 'is empty; give at least one'),) if is_violation else ('a', 'b')
    return {int: 3, float: 0.5, bool: True, str: 'word'}.get(hint) or hint()
