"""Other content with a running operation's number waits, and is refused if the running operation succeeds."""

import asyncio

import pytest

from fixtures.model_verbs import ALICE, FakePorts, create_request, execute, let_others_run
from twinkle_services.kit.errors import InvalidField
from twinkle_services.model.application.service import ModelService
from twinkle_services.model.domain.errors import SequenceReused
from twinkle_services.model.domain.operation import Step, Verb, ZeroGrad
from twinkle_services.model.domain.result import OperationResult


@pytest.fixture
def ports() -> FakePorts:
    """Fake ports of the service."""
    return FakePorts()


async def _start(service: ModelService, *verbs: Verb) -> 'list[asyncio.Future[OperationResult]]':
    """Start operations of one adapter, one after the other, all with the number 1."""
    adapter = await service.create_adapter(ALICE, create_request())
    calls: list[asyncio.Future[OperationResult]] = []
    for verb in verbs:
        calls.append(asyncio.ensure_future(execute(service, adapter, 1, verb)))
        await let_others_run()
    return calls


async def test_other_content_waits_for_a_late_copy_of_a_refused_operation(ports: FakePorts) -> None:
    """If the running operation is refused, an operation with the same number and other content runs afterwards."""
    ports.trainer.failures.append(InvalidField('x', 'is bad'))
    ports.trainer.gate.clear()
    late_copy, corrected = await _start(ports.verbs(), Step(), ZeroGrad())
    assert not corrected.done()
    ports.trainer.gate.set()
    with pytest.raises(InvalidField):
        await late_copy
    assert not (await corrected).is_replayed
    assert [type(verb) for _, verb in ports.trainer.ran][-1] is ZeroGrad


async def test_other_content_is_refused_once_the_running_operation_has_succeeded(ports: FakePorts) -> None:
    """If the running operation succeeds, an operation with the same number and other content is refused."""
    ports.trainer.gate.clear()
    calls = await _start(ports.verbs(), Step(), ZeroGrad(), Step())
    ports.trainer.gate.set()
    first, other, repeated = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(other, SequenceReused)
    assert isinstance(first, OperationResult)
    assert isinstance(repeated, OperationResult)
    assert (first.is_replayed, repeated.is_replayed) == (False, True)
    assert [type(verb) for _, verb in ports.trainer.ran] == [Step]
