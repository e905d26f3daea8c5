"""Routes of the Tinker API over a recording trainer: the native requests, and the responses."""

import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import zstandard

from fixtures.tinker_api import CONTEXT, VOCABULARY, TinkerApi, tinker_api
from twinkle_services.gateway.store.database import Database
from twinkle_services.gateway.tinker.wire import tinker_pb2 as wire
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import dict_from_struct


@pytest.fixture
async def api(database: Database) -> AsyncIterator[TinkerApi]:
    """The API for two tenants."""
    async with tinker_api(database) as running:
        yield running


def datum(tokens: list[int], targets: list[int], **inputs: list[float]) -> wire.Datum:
    """Return a training example whose `inputs` are float32."""
    message = wire.Datum()
    message.model_input.add().encoded_text.tokens = np.array(tokens, '<i4').tobytes()
    message.loss_fn_inputs['target_tokens'].CopyFrom(
        wire.Tensor(dense=np.array(targets, '<i8').tobytes(), dtype=wire.DTYPE_INT64, shape=[len(targets)])
    )
    for name, values in inputs.items():
        tensor = wire.Tensor(dense=np.array(values, '<f4').tobytes(), dtype=wire.DTYPE_FLOAT32, shape=[len(values)])
        message.loss_fn_inputs[name].CopyFrom(tensor)
    return message


def batch(model_id: str, *datums: wire.Datum, seq_id: int = 1, loss_fn: str = 'cross_entropy', **fields: Any) -> bytes:
    """Return a serialized `ForwardBackwardRequest`."""
    request = wire.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, data=datums, loss_fn=loss_fn, **fields)
    return request.SerializeToString()


PROTOBUF = {'content-type': 'application/x-protobuf'}
ACCEPT = {'accept': 'application/x-protobuf'}


async def test_configuration_enables_only_supported_features(api: TinkerApi) -> None:
    """Flags of unsupported features are not set, and the flags that clients need are set."""
    config = (await api.post('client/config', {'sdk_version': '0.38.0'})).json()
    assert {'proto_compress_fwdbwd', 'proto_write_fwdbwd', 'fwd_via_fwdbwd'} <= {key for key in config if config[key]}
    assert not {'custom_loss_server_side', 'pjwt_auth_enabled'} & {key for key in config if config[key]}
    assert (await api.post('client/dynamic_config', {})).json()['refresh_interval_sec'] == 300


async def test_capabilities_combine_trainer_and_sampler(api: TinkerApi) -> None:
    """A base model is listed once, with the shorter context of trainer and sampler."""
    models = (await api.get('get_server_capabilities')).json()['supported_models']
    assert [(model['model_name'], model['trainable'], model['sampleable']) for model in models] == [
        ('other', False, True),
        ('tiny', True, True),
    ]
    assert models[1]['max_context_length'] == CONTEXT
    capabilities = (await api.get('get_server_capabilities')).json()
    assert {'cross_entropy', 'ppo'} <= set(capabilities['loss_fns'])
    assert capabilities['optimizers'] == ['adamw']
    assert capabilities['server_version']
    assert {'max_lora_rank', 'max_batch_tokens'} <= set(models[1])


@pytest.mark.parametrize('is_unembed_trained', [False, True])
async def test_new_session_warns_about_options_without_effect(database: Database, *, is_unembed_trained: bool) -> None:
    """A new session warns about `train_unembed` if the output head is not trained."""
    async with tinker_api(database, is_unembed_trained=is_unembed_trained) as api:
        response = (await api.post('create_session', {'sdk_version': '0.38.0'})).json()
    assert ('train_unembed' in response.get('info_message', '')) is not is_unembed_trained


async def test_unknown_path_has_a_detail(api: TinkerApi) -> None:
    """An unknown path returns 404 with a detail."""
    response = await api.post('unknown_path', {})
    assert response.status_code == 404
    assert response.json()['detail']


@pytest.mark.parametrize('key', ['', 'tml-eve', 'sk-alice'])
async def test_unknown_key_is_refused_by_every_route(api: TinkerApi, key: str) -> None:
    """Routes respond to an unknown key with 401 and a detail."""
    for path in ('client/config', 'create_session', 'retrieve_future', 'forward_backward', 'telemetry'):
        response = await api.post(path, key=key)
        assert (response.status_code, bool(response.json()['detail'])) == (401, True)


async def test_session_accepts_work_until_it_is_finished(api: TinkerApi) -> None:
    """A heartbeat renews a session; after it is finished, heartbeats and new models return 410."""
    session_id = await api.session()
    assert (await api.post('session_heartbeat', {'session_id': session_id})).status_code == 200
    assert (await api.post('session_heartbeat', {'session_id': session_id}, key='tml-bob')).status_code == 404
    body = {'reason': {'type': 'success'}, 'detail': None}
    assert (await api.post(f'sessions/{session_id}/finish', body)).status_code == 200
    assert (await api.post('session_heartbeat', {'session_id': session_id})).status_code == 410
    refused = await api.post('create_model', {'session_id': session_id, 'model_seq_id': 0, 'base_model': 'tiny'})
    assert refused.status_code == 410
    assert api.trainer.created == []


async def test_created_model_is_an_adapter_of_the_same_id(api: TinkerApi) -> None:
    """Rank, seed and layer groups reach the trainer; the id consists of the session id and the number."""
    session_id = await api.session()
    lora = {'rank': 16, 'seed': 7, 'train_unembed': False, 'train_mlp': True, 'train_attn': False}
    body = {
        'session_id': session_id,
        'model_seq_id': 2,
        'base_model': 'tiny',
        'lora_config': lora,
        'optimizer_config': {'type': 'adamw'},
        'user_metadata': {'renderer_name': 'role_colon', 'lr': 0.5},
        'type': 'create_model',
    }
    response = await api.outcome(await api.post('create_model', body))
    assert response.json()['model_id'] == f'{session_id}:train:2'
    request = api.trainer.created[0]
    assert (request.adapter_id, request.base_model) == (f'{session_id}:train:2', 'tiny')
    assert (request.lora_config.lora_rank, request.lora_config.seed) == (16, 7)
    assert list(request.lora_config.target_modules) == ['all-mlp']
    assert dict(request.user_metadata) == {'renderer_name': 'role_colon', 'lr': '0.5'}
    info = (await api.post('get_info', {'model_id': f'{session_id}:train:2'})).json()
    assert info['model_data'] == {'model_name': 'tiny', 'tokenizer_id': 'org/tiny'}
    assert (info['lora_rank'], info['is_lora']) == (16, True)
    assert (await api.post('get_info', {'model_id': f'{session_id}:train:2'}, key='tml-bob')).status_code == 404


@pytest.mark.parametrize(
    ('change', 'named'),
    [
        ({'base_model': 'nope'}, 'tiny'),
        ({'base_model': 'other'}, 'tiny'),
        ({'lora_config': {'rank': 65}}, 'lora_config.rank'),
        ({'lora_config': {'rank': True}}, 'lora_config.rank'),
        ({'lora_config': {'train_mlp': False, 'train_attn': False, 'train_unembed': False}}, 'lora_config'),
        ({'optimizer_config': {'type': 'dimuon', 'version': 1}}, 'dimuon'),
        ({'model_seq_id': -1}, 'model_seq_id'),
        ({'model_seq_id': 1 << 40}, 'model_seq_id'),
        ({'user_metadata': {'a': 'x' * 5000}}, 'user_metadata'),
        ({'session_id': None}, 'session_id'),
    ],
)
async def test_invalid_field_of_a_new_model_is_named(api: TinkerApi, change: dict[str, Any], named: str) -> None:
    """An invalid field of a new model returns 400 with its name, and nothing is submitted."""
    body = {'session_id': await api.session(), 'model_seq_id': 0, 'base_model': 'tiny', **change}
    response = await api.post('create_model', body)
    assert response.status_code == 400
    assert named in response.json()['detail']
    assert api.store.futures == {}


async def test_batch_reaches_the_trainer_and_its_results_are_returned(api: TinkerApi) -> None:
    """Tokens, labels and weights reach the trainer; log-probabilities with offsets and metrics are returned."""
    model_id = await api.model()
    one = datum([1, 2, 3], [2, 3, 4], weights=[0, 1, -2.5])
    two = datum([5, 6], [6, 7], weights=[1, 1])
    response = await api.outcome(
        await api.post('forward_backward', content=batch(model_id, one, two), headers=PROTOBUF), headers=ACCEPT
    )
    assert response.headers['content-type'] == 'application/x-protobuf'
    output = wire.ForwardBackwardOutput.FromString(response.content)
    record = output.loss_fn_outputs[0]
    assert np.frombuffer(record.fields['logprobs'].data, '<f4').tolist() == [0, 1, 2, 0, 1]
    assert np.frombuffer(record.fields['logprobs'].offsets, '<i8').tolist() == [0, 12, 20]
    assert dict(output.metrics) == {'loss:sum': -1.5, 'num_tokens:sum': 5.0, 'ratio:mean': 0.5}
    operation = api.trainer.operations[0]
    features = operation.forward_backward.batch.features.features
    assert np.frombuffer(features[0].labels.data, '<i4').tolist() == [2, 3, 4]
    assert np.frombuffer(features[0].loss_weights.data, '<f4').tolist() == [0, 1, -2.5]
    assert operation.forward_backward.loss.name == 'cross_entropy'


async def test_several_targets_for_a_position_keep_their_shape(api: TinkerApi) -> None:
    """Sparse targets [N, K], K for each of N positions, become candidates with log-probabilities [N, K]."""
    model_id = await api.model()
    message = datum([1, 2], [0, 0])
    rows, columns = np.array([0, 2, 3], '<i8').tobytes(), np.array([0, 1, 0], '<i8').tobytes()
    for name, values, dtype in (('target_tokens', '<i8', wire.DTYPE_INT64), ('weights', '<f4', wire.DTYPE_FLOAT32)):
        tensor = wire.Tensor(dtype=dtype, shape=[2, 2])
        tensor.sparse_csr.values = np.array([7, 8, 9], values).tobytes()
        tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices = rows, columns
        message.loss_fn_inputs[name].CopyFrom(tensor)
    posted = await api.post('forward_backward', content=batch(model_id, message), headers=PROTOBUF)
    output = wire.ForwardBackwardOutput.FromString((await api.outcome(posted, headers=ACCEPT)).content)
    tensor = output.loss_fn_outputs[0].fields['logprobs']
    assert (list(tensor.trailing_shape), len(tensor.data)) == ([2], 16)
    extras = api.trainer.operations[0].forward_backward.batch.features.features[0].extra_tensors
    assert np.frombuffer(extras['target_ids'].data, '<i8').tolist() == [7, 8, 9, 0]
    assert np.frombuffer(extras['target_weights'].data, '<f4').tolist() == [7, 8, 9, 0]


async def test_compressed_batch_is_read(api: TinkerApi) -> None:
    """A zstd body is decompressed and accepted."""
    model_id = await api.model()
    body = zstandard.compress(batch(model_id, datum([1, 2], [2, 3])))
    headers = {**PROTOBUF, 'content-encoding': 'zstd'}
    assert (await api.post('forward_backward', content=body, headers=headers)).status_code == 200


async def test_old_client_sends_and_reads_json(api: TinkerApi) -> None:
    """SDKs up to 0.24 send and read JSON lists for forward and forward_backward."""
    model_id = await api.model()
    example = {
        'model_input': {'chunks': [{'tokens': [1], 'type': 'encoded_text'}, {'tokens': [2, 3]}]},
        'loss_fn_inputs': {
            'target_tokens': {'data': [2, 3, 4], 'dtype': 'int64', 'shape': [3]},
            'weights': {'data': [0, 1.0, 1], 'dtype': 'float32'},
        },
    }
    example_input = {'data': [example], 'loss_fn': 'cross_entropy', 'loss_fn_config': None}
    body = {'model_id': model_id, 'seq_id': 1, 'type': 'forward_backward', 'forward_backward_input': example_input}
    response = (await api.outcome(await api.post('forward_backward', body))).json()
    assert response['loss_fn_outputs'] == [{'logprobs': {'data': [0, 1, 2], 'dtype': 'float32', 'shape': [3]}}]
    assert response['metrics']['loss:sum'] == -1.5
    forward = {'model_id': model_id, 'seq_id': 2, 'forward_input': example_input}
    assert (await api.outcome(await api.post('forward', forward))).status_code == 200
    assert [operation.WhichOneof('verb') for operation in api.trainer.operations] == [
        'forward_backward',
        'forward_only',
    ]


async def test_operations_run_in_order_for_any_order_of_arrival(api: TinkerApi) -> None:
    """Operations that arrive as 2, 3, 1 run as 1, 2, 3."""
    model_id = await api.model()
    posted = {
        seq: await api.post(
            'forward_backward', content=batch(model_id, datum([seq], [seq]), seq_id=seq), headers=PROTOBUF
        )
        for seq in (2, 3, 1)
    }
    for response in posted.values():
        assert (await api.outcome(response, headers=ACCEPT)).status_code == 200
    first_tokens = [
        item.forward_backward.batch.features.features[0].input_ids.data[0] for item in api.trainer.operations
    ]
    assert first_tokens == [1, 2, 3]


async def test_repeat_returns_the_same_future_and_other_content_is_refused(api: TinkerApi) -> None:
    """A repeated operation returns the same future; other content at the same position returns 400."""
    model_id = await api.model()
    first = await api.post('optim_step', {'model_id': model_id, 'seq_id': 1, 'adam_params': {'learning_rate': 0.5}})
    again = await api.post('optim_step', {'model_id': model_id, 'seq_id': 1, 'adam_params': {'learning_rate': 0.5}})
    other = await api.post('optim_step', {'model_id': model_id, 'seq_id': 1, 'adam_params': {'learning_rate': 0.6}})
    assert first.json()['request_id'] == again.json()['request_id']
    assert other.status_code == 400
    await api.outcome(first)
    assert len(api.trainer.operations) == 1


async def test_arguments_of_a_step_reach_the_trainer(api: TinkerApi) -> None:
    """Learning rate, betas, epsilon, weight decay and clipping reach the trainer; 0 disables clipping."""
    model_id = await api.model()
    adam = {'learning_rate': 0.25, 'beta1': 0.5, 'beta2': 0.75, 'eps': 1e-8, 'weight_decay': 0.125}
    for seq, limit in ((1, 0.0), (2, 3.5)):
        body = {'model_id': model_id, 'seq_id': seq, 'adam_params': {**adam, 'grad_clip_norm': limit}}
        response = (await api.outcome(await api.post('optim_step', body))).json()
        assert response['metrics'] == {'learning_rate:mean': 0.25, 'grad_norm:mean': 2.0}
    steps = [operation.clip_grad_and_step for operation in api.trainer.operations]
    assert [step.max_grad_norm for step in steps] == [math.inf, 3.5]
    assert dict_from_struct(steps[0].optimizer_options) == {'betas': [0.5, 0.75], 'eps': 1e-8, 'weight_decay': 0.125}


async def test_weights_are_saved_under_names_of_their_kind(api: TinkerApi) -> None:
    """Paths state the kind of weights, and only training weights include the optimizer."""
    model_id = await api.model()
    rows = (('save_weights', 'weights'), ('save_weights_for_sampler', 'sampler_weights'))
    for seq, (route, kind) in enumerate((*rows, ('save_weights_external', 'external_weights')), 1):
        body = {'model_id': model_id, 'seq_id': seq, 'path': 'best', 'ttl_seconds': 7200}
        response = (await api.outcome(await api.post(route, body))).json()
        assert response['path'] == f'tinker://{model_id}/{kind}/best'
    saves = [operation.save for operation in api.trainer.operations]
    assert [save.name for save in saves] == ['best', 'best.sampler', 'best.external']
    assert [save.is_optimizer_included for save in saves] == [True, False, False]
    assert {save.ttl.seconds for save in saves} == {7200}
    info = (await api.post('weights_info', {'tinker_path': f'tinker://{model_id}/weights/best'})).json()
    assert (info['base_model'], info['is_lora']) == ('tiny', True)


@pytest.mark.parametrize('kind', ['snapshot', 'inflight'])
async def test_weights_without_a_name_become_a_sampling_session(api: TinkerApi, kind: str) -> None:
    """A snapshot's version is pinned, and the sampling session has the number that the client chose."""
    model_id = await api.model()
    body = {'model_id': model_id, 'seq_id': 1, 'sampling_session_seq_id': 4, 'kind': kind}
    posted = await api.post('save_weights_for_sampler', body)
    session_id = model_id.partition(':')[0]
    assert (await api.outcome(posted)).json()['sampling_session_id'] == f'{session_id}:sample:4'
    assert api.trainer.operations[0].publish_version.is_pinned is (kind == 'snapshot')
    (handle,) = api.handles
    assert (handle.future_id, handle.is_inflight) == (posted.json()['request_id'], kind == 'inflight')


async def test_resent_save_keeps_its_first_sampling_session(api: TinkerApi) -> None:
    """A resent save keeps its first sampling session; other content at the position is refused."""
    model_id = await api.model()
    body = {'model_id': model_id, 'seq_id': 1, 'sampling_session_seq_id': 4, 'kind': 'snapshot'}
    first, again = [
        (await api.post('save_weights_for_sampler', {**body, 'sampling_session_seq_id': number})).json()
        for number in (4, 5)
    ]
    assert again['request_id'] == first['request_id']
    session_id = model_id.partition(':')[0]
    assert {handle.handle_id for handle in api.handles} == {f'{session_id}:sample:4'}
    assert len(api.trainer.operations) == 1
    other = await api.post('save_weights_for_sampler', {**body, 'kind': 'inflight'})
    assert (other.status_code, other.json()['reason']) == (400, 'REQUEST_ID_REUSED')


async def test_model_starts_from_saved_weights(api: TinkerApi) -> None:
    """A model can be created from saved weights, and saved weights can be loaded into a model."""
    source = await api.model()
    await api.outcome(await api.post('save_weights', {'model_id': source, 'seq_id': 1, 'path': 'mid'}))
    path = f'tinker://{source}/weights/mid'
    session_id = await api.session()
    created = await api.outcome(
        await api.post('load_weights', {'session_id': session_id, 'model_seq_id': 0, 'path': path, 'optimizer': True})
    )
    assert created.json() == {'path': path, 'model_id': f'{session_id}:train:0', 'type': 'load_weights'}
    request = api.trainer.created[-1]
    assert (request.checkpoint_path, request.is_optimizer_included) == (f'twinkle://{source}/weights/mid', True)
    assert not request.HasField('lora_config')
    loaded = await api.post('load_weights', {'model_id': source, 'seq_id': 2, 'path': path, 'optimizer': False})
    assert (await api.outcome(loaded)).json()['path'] == path
    absent = {'session_id': session_id, 'model_seq_id': 1, 'path': path.replace('mid', 'no'), 'optimizer': True}
    assert (await api.post('load_weights', absent)).status_code == 404
    assert (await api.post('load_weights', {**absent, 'path': path}, key='tml-bob')).status_code == 404


async def test_unloaded_model_is_deleted(api: TinkerApi) -> None:
    """An unloaded model is deleted from the trainer."""
    model_id = await api.model()
    assert (await api.outcome(await api.post('unload_model', {'model_id': model_id}))).json()['model_id'] == model_id
    assert api.trainer.deleted == [model_id]


async def test_failed_future_has_a_category(api: TinkerApi) -> None:
    """A failed future returns a category, and an error with Tinker's field names."""
    model_id = await api.model()
    field = 'operation.forward_backward.batch.features[2].labels'
    api.trainer.failures[f'{model_id}:1'] = InvalidField(field, 'is too large')
    posted = await api.post('forward_backward', content=batch(model_id, datum([1], [1])), headers=PROTOBUF)
    response = (await api.outcome(posted, headers=ACCEPT)).json()
    assert (response['category'], response['error']) == ('user', 'data[2].target_tokens: is too large')


async def test_futures_of_other_tenants_are_not_found(api: TinkerApi) -> None:
    """A request for another tenant's future or an unknown future returns 404."""
    model_id = await api.model()
    posted = await api.post('optim_step', {'model_id': model_id, 'seq_id': 1})
    foreign = await api.outcome(posted, key='tml-bob')
    unknown = await api.post('retrieve_future', {'request_id': 'fu-unknown'})
    assert foreign.status_code == unknown.status_code == 404
    assert (await api.post('cancel_future', {'request_id': 'fu-unknown'})).status_code == 404
    assert (await api.post('optim_step', {'model_id': model_id, 'seq_id': 2}, key='tml-bob')).status_code == 404


async def test_custom_loss_is_refused(api: TinkerApi) -> None:
    """Custom losses and their graphs are refused."""
    model_id = await api.model()
    assert (await api.post('create_custom_loss', {'name': 'x', 'graph': {}})).status_code == 400
    body = batch(model_id, datum([1], [1]), loss_fn='custom')
    assert (await api.post('forward_backward', content=body, headers=PROTOBUF)).status_code == 400


async def test_refused_operation_uses_its_position(api: TinkerApi) -> None:
    """A refused operation consumes its position, so the next operation runs."""
    model_id = await api.model()
    bad = batch(model_id, datum([1], [VOCABULARY]), seq_id=1)
    assert (await api.post('forward_backward', content=bad, headers=PROTOBUF)).status_code == 400
    step = {'model_id': model_id, 'seq_id': 2, 'adam_params': {'beta1': 2}}
    assert (await api.post('optim_step', step)).status_code == 400
    good = batch(model_id, datum([1], [1]), seq_id=3)
    posted = await api.post('forward_backward', content=good, headers=PROTOBUF)
    assert (await api.outcome(posted, headers=ACCEPT)).headers['content-type'] == 'application/x-protobuf'
    assert len(api.trainer.operations) == 1


async def test_refusal_without_a_lane_uses_no_position(api: TinkerApi) -> None:
    """Another tenant's request or an invalid number consumes no position in a lane."""
    model_id = await api.model()
    before = set(api.store.futures)
    for key, seq_id in (('tml-bob', 1), ('tml-alice', 0), ('tml-alice', -1), ('tml-alice', 'x'), ('tml-alice', None)):
        step = {'model_id': model_id, 'seq_id': seq_id, 'adam_params': {'beta1': 2}}
        assert (await api.post('optim_step', step, key=key)).status_code in {400, 404}
    assert set(api.store.futures) == before
