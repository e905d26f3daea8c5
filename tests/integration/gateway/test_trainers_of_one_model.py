"""Two model services ("trainers") of one base model: a run stays on one trainer until the other takes it over."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx
import pytest

from fixtures import checkpoint_service
from fixtures.faulty_service import free_port
from fixtures.gateway_pair import Pair as TinkerClient
from fixtures.killed_model import LORA
from fixtures.model_service import RunningModel, draw_example, forward_backward, operation_of, serving_model_at
from fixtures.running_gateway import ADMIN, ADMIN_KEY, RunningGateway, failure_of, running_gateway
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc
from twinkle.api.model.v1 import (
    adapter_service_pb2,
    adapter_service_pb2_grpc,
    operation_pb2,
    training_service_pb2,
    training_service_pb2_grpc,
)

TOKENS = [3, 9, 4, 1, 5, 9, 2, 6]
TINKER_BATCH = {
    'forward_backward_input': {
        'data': [
            {
                'model_input': {'chunks': [{'type': 'encoded_text', 'tokens': TOKENS}]},
                'loss_fn_inputs': {
                    'target_tokens': {'data': TOKENS, 'dtype': 'int64', 'shape': [8]},
                    'weights': {'data': [1.0] * 8, 'dtype': 'float32', 'shape': [8]},
                },
            }
        ],
        'loss_fn': 'cross_entropy',
    }
}


class TrainerProcess:
    """A model service in a separate process, which a test can kill."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.address = f'127.0.0.1:{free_port()}'
        self._settings = {**settings, 'listen': self.address}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process without waiting until it serves."""
        words = [word for name, value in self._settings.items() for word in ('--set', f'{name}={value}')]
        self._process = await asyncio.create_subprocess_exec(sys.executable, '-m', 'twinkle_services.model', *words)

    async def kill(self) -> None:
        """Kill the process, as a failure of its machine would."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@dataclass
class Deployment:
    """A gateway with two trainers: the test kills `ended`, and `other` continues."""

    gateway: RunningGateway
    ended: TrainerProcess
    other: RunningModel
    base_model: str

    @property
    def adapters(self) -> Any:
        """Stub of the adapter service at the gateway."""
        return adapter_service_pb2_grpc.AdapterServiceStub(self.gateway.channel)

    def create(self, request_id: str) -> Any:
        """Start a call of CreateAdapter."""
        request = adapter_service_pb2.CreateAdapterRequest(
            request_id=request_id, base_model=self.base_model, lora_config=LORA
        )
        return self.adapters.CreateAdapter(request, metadata=ADMIN)

    async def created(self, request_ids: Iterator[str]) -> str:
        """Create an adapter with the first request id that is not refused; return the adapter's id."""
        for request_id in request_ids:
            try:
                return (await self.create(request_id)).adapter.adapter_id
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 (other attempts follow)
        raise AssertionError('every creation failed with UNAVAILABLE')

    def execute(self, adapter_id: str, number: int) -> Any:
        """Start a training operation: a batch for odd numbers, a step for even numbers."""
        verb: dict[str, Any] = {'clip_grad_and_step': operation_pb2.ClipGradAndStep(max_grad_norm=1.0)}
        if number % 2:
            verb = {'forward_backward': forward_backward([draw_example(seed=number), draw_example(9, seed=number)])}
        request = training_service_pb2.ExecuteRequest(operation=operation_of(adapter_id, number, **verb))
        return training_service_pb2_grpc.TrainingServiceStub(self.gateway.channel).Execute(request, metadata=ADMIN)

    async def trained(self, adapter_id: str, numbers: range) -> list[tuple[float, float]]:
        """Run operations; return the loss and the gradient norm of each."""
        results = [(await self.execute(adapter_id, number)).result for number in numbers]
        return [(result.forward.loss, result.step.grad_norm) for result in results]

    async def digest(self, adapter_id: str, number: int) -> str:
        """Publish a version and return its digest."""
        operation = operation_of(adapter_id, number, publish_version=operation_pb2.PublishVersion())
        stub = training_service_pb2_grpc.TrainingServiceStub(self.gateway.channel)
        response = await stub.Execute(training_service_pb2.ExecuteRequest(operation=operation), metadata=ADMIN)
        return response.result.publish.digest

    def take_over(self) -> Any:
        """Start a takeover of the runs of `ended`."""
        request = adapter_service_pb2.TakeOverRequest(base_model=self.base_model, trainer='ended')
        return self.adapters.TakeOver(request, metadata=ADMIN)

    def end_lease(self) -> Any:
        """Start a call of EndLease. The gateway calls one trainer after the other until a trainer has ended a lease."""
        request = adapter_service_pb2.EndLeaseRequest(base_model=self.base_model)
        return self.adapters.EndLease(request, metadata=ADMIN)

    async def listed(self) -> list[str]:
        """Return the ids of all adapters, once both trainers respond."""
        while True:
            try:
                response = await self.adapters.ListAdapters(
                    adapter_service_pb2.ListAdaptersRequest(page_size=1000), metadata=ADMIN
                )
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017 (repeated until it succeeds)
            else:
                return sorted(item.adapter_id for item in response.adapters)

    async def active_runs(self) -> list[str]:
        """Return the ids of the active runs in the catalogue."""
        stub = catalogue_service_pb2_grpc.CatalogueServiceStub(self.gateway.channel)
        response = await stub.ListRuns(catalogue_service_pb2.ListRunsRequest(page_size=1000), metadata=ADMIN)
        return sorted(run.run_id for run in response.runs if run.is_active)

    def at_other(self) -> set[str]:
        """Return the ids of the adapters of `other`."""
        return {adapter.adapter_id for adapter in self.other.verbs.directory.all()}


@asynccontextmanager
async def _deployed(model_dir: Path, state: Path) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        checkpoints = await stack.enter_async_context(checkpoint_service.serving(state / 'checkpoints'))
        settings: dict[str, object] = {
            'base_model': model_dir,
            'checkpoint_address': checkpoints.address,
            'thread_count': 1,
            'state_dir': state / 'ended',
            'peer_trainers': f'{{ended: {state / "ended"}, other: {state / "other"}}}',
        }
        ended = TrainerProcess(settings)
        await ended.start()
        stack.push_async_callback(ended.kill)
        peers = {'ended': state / 'ended', 'other': state / 'other'}
        other = await stack.enter_async_context(
            serving_model_at(checkpoints.address, model_dir, state / 'other', peer_trainers=peers)
        )
        gateway = await stack.enter_async_context(
            running_gateway(
                state / 'gateway',
                models=(ended.address, other.address),
                checkpoint=checkpoints.address,
                internal_token='',
                server_info_freshness=timedelta(),
                http_listen='127.0.0.1:0',
            )
        )
        deployment = Deployment(gateway, ended, other, str(model_dir))
        await deployment.listed()
        yield deployment


async def _created_at_both(deployment: Deployment) -> tuple[list[str], set[str]]:
    """Create adapters on both trainers, the last one on `ended`; return the ids of all and of those on `other`."""
    ids = list[str]()
    while len(ids) < 4 or ids[-1] in deployment.at_other():
        # All first creations may be on `other`, until the gateway finds that `ended` responds.
        ids.append((await deployment.create(f'r{len(ids)}')).adapter.adapter_id)
    others = deployment.at_other()
    assert others
    for index, adapter_id in enumerate(ids):
        assert (await deployment.create(f'r{index}')).adapter.adapter_id == adapter_id
    return ids, others


async def _trained_by_tinker(deployment: Deployment, tinker: TinkerClient) -> list[tuple[str, Any]]:
    """Create and train models with the Tinker API until one is on `ended`; return all with their first results."""
    found = list[tuple[str, Any]]()
    while not found or found[-1][0] in deployment.at_other():
        model_id, [first] = await tinker.train(deployment.base_model, [('forward_backward', TINKER_BATCH)])
        found.append((model_id, first))
    return found


async def _check_return(deployment: Deployment, known: list[str]) -> None:
    """Restart the killed trainer; check that it has none of the `known` adapters and gets new ones."""
    await deployment.ended.start()
    assert await deployment.listed() == sorted(known)
    assert deployment.at_other() == set(known)
    every = list(known)
    while every[-1] in deployment.at_other():
        every.append(await deployment.created(f'm{len(every)}-{index}' for index in range(1000)))
    assert await deployment.listed() == sorted(every)
    while await deployment.active_runs() != sorted(every):
        pass


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_runs_of_a_killed_trainer_continue_bitwise_at_the_other_one(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """A killed trainer affects only its own runs, which continue bitwise at the other trainer after a takeover."""
    for name in ('ended', 'other', 'gateway', 'checkpoints'):
        (tmp_path / name).mkdir()
    async with (
        _deployed(tiny_llama_dir, tmp_path) as deployment,
        httpx.AsyncClient(
            base_url=f'http://{deployment.gateway.http_address}', headers={'x-api-key': ADMIN_KEY}, timeout=60
        ) as http,
    ):
        tinker = TinkerClient([http], Random(0))
        ids, others = await _created_at_both(deployment)
        moving, staying = ids[-1], next(item for item in ids if item in others)
        *at_other, (model_id, first) = await _trained_by_tinker(deployment, tinker)
        assert await deployment.trained(moving, range(1, 4)) == await deployment.trained(staying, range(1, 4))
        refused = await failure_of(deployment.take_over())
        assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, 'TAKEOVER_REFUSED')

        await deployment.ended.kill()
        assert (await failure_of(deployment.execute(moving, 4))).code is grpc.StatusCode.UNAVAILABLE
        expected = await deployment.trained(staying, range(4, 9))
        new = await deployment.created(f'n{index}' for index in range(1000))
        assert new in deployment.at_other()
        repeated = await failure_of(deployment.create(f'r{ids.index(moving)}'))
        assert repeated.code is grpc.StatusCode.UNAVAILABLE
        assert (await failure_of(deployment.end_lease())).code is grpc.StatusCode.UNAVAILABLE
        waiting = await tinker.post('forward_backward', {'model_id': model_id, 'seq_id': 2, **TINKER_BATCH})

        assert (await deployment.take_over()).adapter_count == len(ids) - len(others) + 1
        assert not (await deployment.take_over()).adapter_count
        assert await deployment.trained(moving, range(4, 9)) == expected
        assert await deployment.digest(moving, 9) == await deployment.digest(staying, 9)
        second = await tinker.outcome(waiting)
        assert second['loss_fn_outputs'] == first['loss_fn_outputs']
        assert (await deployment.create(f'r{ids.index(moving)}')).adapter.adapter_id == moving

        await _check_return(deployment, [*ids, new, model_id, *(other_id for other_id, _ in at_other)])
        await deployment.digest(moving, 10)
