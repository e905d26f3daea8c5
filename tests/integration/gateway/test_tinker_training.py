"""Tests of training, saving and loading in the Tinker API, with a real model service and a tiny model."""

import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tinker.lib.retry_handler import is_retryable_status_code

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.model_service import serving_model
from fixtures.running_gateway import ADMIN_KEY, RunningGateway, running_gateway
from fixtures.sampler_service import serving_sampler
from twinkle_services.gateway.tinker.datums import BOUNDS, LOSSES, rule_of
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.sampler.backends.checkpoint_client import CheckpointClient

TOKENS = [3, 9, 4, 1, 5, 9, 2, 6]


@dataclass
class Client:
    """A client that counts its operations, as the SDK does."""

    http: httpx.AsyncClient
    gateway: RunningGateway
    model_id: str = ''
    base_model: str = ''
    count: int = 0

    async def post(self, path: str, body: Any = None, **fields: Any) -> httpx.Response:
        """Post `body` as JSON, or the bytes in `content`, and return the response."""
        given = {'content': fields['content']} if 'content' in fields else {'json': body or {}}
        return await self.http.post(f'/api/v1/{path}', headers=fields.get('headers', {}), **given)

    async def outcome(self, response: httpx.Response, **fields: Any) -> httpx.Response:
        """Return the outcome of a future."""
        assert response.status_code == 200, response.text
        done = await self.post('retrieve_future', {'request_id': response.json()['request_id']}, **fields)
        assert done.status_code == 200, done.text
        return done

    async def run(self, route: str, /, **body: Any) -> dict[str, Any]:
        """Run the next operation of the model, and return its outcome."""
        self.count += 1
        response = await self.post(route, {'model_id': self.model_id, 'seq_id': self.count, **body})
        return (await self.outcome(response)).json()

    async def create_model(self, number: int = 0, **lora: Any) -> None:
        """Create a session and a model."""
        session_id = (await self.post('create_session', {'sdk_version': '0.38.0'})).json()['session_id']
        body = {'session_id': session_id, 'model_seq_id': number, 'base_model': self.base_model, 'lora_config': lora}
        done = (await self.outcome(await self.post('create_model', body))).json()
        self.model_id, self.count = done['model_id'], 0

    async def train(self, loss_fn: str = 'cross_entropy', **inputs: Any) -> tuple[np.ndarray, dict[str, float]]:
        """Run forward, and backward unless `forward_only` is set; return log-probabilities and metrics."""
        self.count += 1
        is_forward = inputs.pop('forward_only', False)
        request = wire.ForwardBackwardRequest(
            model_id=self.model_id, seq_id=self.count, loss_fn=loss_fn, forward_only=is_forward
        )
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(TOKENS[:-1], '<i4').tobytes()
        arrays = {'target_tokens': np.array(TOKENS[1:], '<i8'), **inputs}
        for name, array in arrays.items():
            dtype = wire.DTYPE_INT64 if array.dtype.kind == 'i' else wire.DTYPE_FLOAT32
            datum.loss_fn_inputs[name].CopyFrom(wire.Tensor(dense=array.tobytes(), dtype=dtype, shape=array.shape))
        posted = await self.post(
            'forward_backward',
            content=request.SerializeToString(),
            headers={'content-type': 'application/x-protobuf'},
        )
        done = await self.outcome(posted, headers={'accept': 'application/x-protobuf'})
        assert done.headers['content-type'] == 'application/x-protobuf', done.text
        output = wire.ForwardBackwardOutput.FromString(done.content)
        field = output.loss_fn_outputs[0].fields['logprobs']
        shape = (len(TOKENS) - 1, *field.trailing_shape)
        return np.frombuffer(field.data, '<f4').reshape(shape), dict(output.metrics)


@pytest.fixture
async def client(tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Client]:
    """A client of a gateway with a model service, a checkpoint service, and a sampler with a fake engine."""
    (tmp_path / 'model').mkdir()
    (tmp_path / 'gateway').mkdir()
    async with (
        serving_model(tiny_llama_dir, tmp_path / 'model') as model,
        open_channel(model.checkpoints.address) as checkpoints,
        serving_sampler(
            FakeSamplerEngine(model.base_model), CheckpointClient(checkpoints), tmp_path / 'sampler'
        ) as sampler,
        running_gateway(
            tmp_path / 'gateway',
            upstream=model.address,
            sampler=sampler.address,
            checkpoint=model.checkpoints.address,
            http_listen='127.0.0.1:0',
            internal_token='',
        ) as gateway,
        httpx.AsyncClient(
            base_url=f'http://{gateway.http_address}', headers={'x-api-key': ADMIN_KEY}, timeout=60
        ) as http,
    ):
        yield Client(http, gateway, base_model=model.base_model)


ONES = np.ones(len(TOKENS) - 1, '<f4')
ADAM = {'adam_params': {'learning_rate': 0.02, 'beta1': 0.9, 'beta2': 0.95, 'eps': 1e-12}}


async def test_loss_is_the_sum_of_its_tokens_and_falls(client: Client) -> None:
    """Cross-entropy is minus the weighted sum of the returned log-probabilities, and training reduces it."""
    await client.create_model(rank=4, seed=1)
    weights = np.array([0, 1, 2, -0.5, 1, 1, 1], '<f4')
    logps, metrics = await client.train(weights=weights, forward_only=True)
    assert math.isclose(metrics['loss:sum'], -float((logps * weights).sum()), rel_tol=1e-4)
    losses: list[float] = []
    for _ in range(6):
        losses.append((await client.train(weights=ONES))[1]['loss:sum'])
        assert 'learning_rate:mean' in (await client.run('optim_step', **ADAM))['metrics']
    assert losses[-1] < 0.8 * losses[0]


async def test_policy_losses_have_their_closed_forms(client: Client) -> None:
    """Importance sampling is -sum(r A) with r = exp(lp - q); PPO uses the smaller of the clipped and the plain term."""
    await client.create_model(rank=4, seed=1)
    logps, _ = await client.train(forward_only=True)
    q, advantages = logps - np.linspace(-0.4, 0.4, len(logps), dtype='<f4'), np.array([1, -1, 2, 0, 1, -2, 1], '<f4')
    ratio = np.exp(logps - q)
    _, metrics = await client.train('importance_sampling', logprobs=q, advantages=advantages, forward_only=True)
    assert math.isclose(metrics['loss:sum'], -float((ratio * advantages).sum()), rel_tol=1e-3)
    _, metrics = await client.train('ppo', logprobs=q, advantages=advantages)
    smaller_terms = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    assert math.isclose(metrics['loss:sum'], -float(smaller_terms.sum()), rel_tol=1e-3)


async def test_bounds_of_every_policy_loss_have_defaults(client: Client) -> None:
    """Every loss with clipping bounds has default bounds; the upper bound of gspo is 1.0004."""
    await client.create_model(rank=4, seed=1)
    logps, _ = await client.train(forward_only=True)
    advantages, inputs = np.array([1, -1, 2, 0, 1, -2, 1], '<f4'), {'logprobs': logps - ONES / 4}
    for name in (name for name in LOSSES if rule_of(name).options >= BOUNDS):
        mask = {'sequence_ratio_mask': ONES} if 'sequence_ratio_mask' in rule_of(name).required else {}
        _, metrics = await client.train(name, advantages=advantages, **inputs, **mask)
        assert math.isfinite(metrics['loss:sum'])
    _, metrics = await client.train('gspo', advantages=advantages, **inputs, sequence_ratio_mask=ONES)
    smaller_terms = np.minimum(math.exp(1 / 4) * advantages, 1.0004 * advantages)
    assert math.isclose(metrics['loss:sum'], -float(smaller_terms.sum()), rel_tol=1e-4)


async def test_training_continues_from_saved_weights(client: Client) -> None:
    """A model that is created from a checkpoint with its optimizer takes the same steps as the original."""
    await client.create_model(rank=4, seed=1)
    for _ in range(2):
        await client.train(weights=ONES)
        await client.run('optim_step', **ADAM)
    path = (await client.run('save_weights', path='mid'))['path']
    assert path == f'tinker://{client.model_id}/weights/mid'
    info = (await client.post('weights_info', {'tinker_path': path})).json()
    assert info['base_model'] == Path(client.base_model).name
    await client.train(weights=ONES)
    await client.run('optim_step', **ADAM)
    expected, _ = await client.train(weights=ONES, forward_only=True)
    session_id = (await client.post('create_session')).json()['session_id']
    body = {'session_id': session_id, 'model_seq_id': 0, 'path': path, 'optimizer': True}
    created = (await client.outcome(await client.post('load_weights', body))).json()
    client.model_id, client.count = created['model_id'], 0
    await client.train(weights=ONES)
    await client.run('optim_step', **ADAM)
    repeated, _ = await client.train(weights=ONES, forward_only=True)
    np.testing.assert_array_equal(repeated, expected)
    info = (await client.post('get_info', {'model_id': created['model_id']})).json()
    assert info['lora_rank'] == 4


async def test_seed_determines_the_first_weights(client: Client) -> None:
    """Models with the same seed take the same first step, and a model with a different seed takes a different step."""
    outcomes: list[np.ndarray] = []
    for seed in (1, 1, 2):
        await client.create_model(rank=4, seed=seed)
        await client.train(weights=ONES)
        await client.run('optim_step', **ADAM)
        outcomes.append((await client.train(forward_only=True))[0])
    np.testing.assert_array_equal(outcomes[0], outcomes[1])
    assert not np.array_equal(outcomes[0], outcomes[2])


async def test_operation_after_a_refused_operation_runs(client: Client) -> None:
    """An operation that the model service refuses fails as a user error, and later operations run."""
    await client.create_model(rank=4, seed=1)
    await client.train(weights=ONES)
    assert 'error' not in await client.run('save_weights', path='x', ttl_seconds=3600)
    refused = await client.run('save_weights', path='x')
    assert refused['category'] == 'user'
    assert 'error' not in await client.run('save_weights', path='x', overwrite=True)
    assert (await client.train(weights=ONES))[1]['num_tokens:sum'] == len(ONES)
    assert (await client.run('optim_step', **ADAM))['metrics']['grad_norm:mean'] > 0


async def test_several_targets_for_a_position_are_weighted(client: Client) -> None:
    """Two targets with all weight on the first target give plain cross-entropy; each has a log-probability."""
    await client.create_model(rank=4, seed=1)
    single, metrics = await client.train(weights=ONES, forward_only=True)
    targets = np.stack([np.array(TOKENS[1:]), np.full(len(ONES), 7)], axis=1).astype('<i8')
    first_only = np.stack([ONES, 0 * ONES], axis=1)
    both, wide = await client.train(target_tokens=targets, weights=first_only, forward_only=True)
    np.testing.assert_allclose(both[:, 0], single, rtol=1e-5)
    assert math.isclose(wide['loss:sum'], metrics['loss:sum'], rel_tol=1e-5)
    halves, mixed = await client.train(target_tokens=targets, weights=0.5 * np.ones_like(first_only))
    assert math.isclose(mixed['loss:sum'], -0.5 * float(halves.sum()), rel_tol=1e-5)


async def test_groups_of_layers_are_trained_separately(client: Client) -> None:
    """Training attention layers, feed-forward layers or both gives different gradient norms."""
    grad_norms: list[float] = []
    for switches in ({'train_mlp': False}, {'train_attn': False}, {}):
        await client.create_model(rank=4, seed=1, **switches)
        await client.train(weights=ONES)
        grad_norms.append((await client.run('optim_step', **ADAM))['metrics']['grad_norm:mean'])
        path = (await client.run('save_weights', path='saved'))['path']
        info = (await client.post('weights_info', {'tinker_path': path})).json()
        # SDKs before 0.24 create the model from these fields, and then load the weights into it.
        chosen = {name: info[name] for name in ('train_attn', 'train_mlp', 'train_unembed')}
        assert chosen == {'train_attn': True, 'train_mlp': True, 'train_unembed': False, **switches}
        await client.create_model(rank=info['lora_rank'], **chosen)
        assert 'error' not in await client.run('load_weights', path=path, optimizer=True)
    assert len(set(grad_norms)) == 3


@pytest.mark.parametrize('name', ['record.json', '*/adapter_model.safetensors'])
async def test_damaged_checkpoint_is_an_error_that_the_sdk_does_not_retry(
    client: Client, tmp_path: Path, name: str
) -> None:
    """Links, loads and samples of a damaged checkpoint fail without a retry, as user errors that name the damage."""
    await client.create_model(rank=4, seed=1)
    paths = {
        kind: (await client.run(kind, path='kept'))['path'] for kind in ('save_weights', 'save_weights_for_sampler')
    }
    session_id = (await client.post('create_session')).json()['session_id']
    handle = {'session_id': session_id, 'sampling_session_seq_id': 0, 'model_path': paths['save_weights_for_sampler']}
    created = (await client.post('create_sampling_session', handle)).json()
    link = await client.http.get(f'/api/v1/training_runs/{client.model_id}/checkpoints/weights/kept/archive')
    files = list((tmp_path / 'model').glob(f'checkpoint/states/*/*/weights/*/{name}'))
    assert len(files) == 2
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    loaded = {'path': paths['save_weights'], 'optimizer': True}
    sampled = {'prompt': {'chunks': [{'type': 'encoded_text', 'tokens': TOKENS}]}, 'sampling_params': {'max_tokens': 2}}
    responses = [
        await client.http.get(link.headers['location']),
        await client.post('load_weights', {'model_id': client.model_id, 'seq_id': 3, **loaded}),
        await client.post('load_weights', {'session_id': session_id, 'model_seq_id': 0, **loaded}),
        await client.post('asample', {'sampling_session_id': created['sampling_session_id'], 'seq_id': 0, **sampled}),
        await client.post('asample', {'model_path': paths['save_weights_for_sampler'], **sampled}),
    ]
    for response in responses:
        if response.is_success:
            failed = (await client.outcome(response)).json()
            assert (failed['category'], 'differ from the saved ones' in failed['error']) == ('user', True)
        else:
            assert (response.status_code, response.json()['reason']) == (400, 'CHECKPOINT_DAMAGED')
            assert not is_retryable_status_code(response.status_code)
    client.count = 3
    assert 'error' not in await client.run('save_weights', path='kept', overwrite=True)
