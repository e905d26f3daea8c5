"""Routes that create models from fresh or saved weights, load weights into models, and describe and unload models.

Functions raise InvalidField with the path of the first wrong field.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_config_pb2
from twinkle_services.gateway.catalogue.paths import WeightsKind, WeightsPath
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.fleet.model_routes import shown_name
from twinkle_services.gateway.fleet.upstreams import GrpcLookups
from twinkle_services.gateway.futures.rules import CREATE_KIND, DELETE_KIND, FutureRequest
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.http.validation import Int64, not_served, read_model
from twinkle_services.gateway.tinker.base_models import BaseModels
from twinkle_services.gateway.tinker.bodies import (
    BaseModelName,
    Counter,
    Labels,
    ModelId,
    OperationBody,
    OptimizerKind,
    TinkerModel,
    WeightsPathField,
    read_body,
    read_object,
)
from twinkle_services.gateway.tinker.routes import TRAIN, tinker_route
from twinkle_services.gateway.tinker.submission import (
    FutureNote,
    Operations,
    Verb,
    acknowledged,
    creation_key,
    model_id_of,
    session_of,
)
from twinkle_services.gateway.tinker.training import default_optimizer
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.context import current_caller

LORA_ALPHA = 32.0
"""Alpha of all adapters. Tinker's clients do not send it, but the files that they download contain it."""
_GROUPS = {'train_attn': 'all-attention', 'train_mlp': 'all-mlp', 'train_unembed': 'output-head'}
"""Native groups of layers, by the client's switch that enables the training of the group."""
_GROUP_NAMES = frozenset({*_GROUPS.values(), 'all-linear'})
_ADAMW = {'type': 'adamw'}


class OptimizerConfig(TinkerModel):
    """Optimizer of a model."""

    type: OptimizerKind = 'adamw'


class LoraConfig(TinkerModel):
    """LoRA configuration of a model."""

    rank: Annotated[int, Field(ge=1, le=1 << 16)] = 32
    seed: Int64 | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class NewModelBody(TinkerModel):
    """Fields of every request for a new model."""

    optimizer_config: OptimizerConfig = OptimizerConfig()
    session_id: Annotated[str, Field(min_length=1, max_length=100)]
    model_seq_id: Counter
    user_metadata: Labels = Field(default_factory=dict[str, str])

    @property
    def model_id(self) -> str:
        return model_id_of(self.session_id, self.model_seq_id)


class CreateModelBody(NewModelBody):
    """Body of `create_model`."""

    base_model: BaseModelName
    lora_config: LoraConfig = LoraConfig()


class LoadedWeights(TinkerModel):
    """Saved weights that a new model starts from, or that a model loads."""

    optimizer: bool = False
    """Whether to restore the optimizer state."""
    path: WeightsPathField

    @field_validator('path')
    @classmethod
    def _check_kind(cls, path: WeightsPath, info: ValidationInfo) -> WeightsPath:
        if path.kind is not WeightsKind.TRAINING and info.data.get('optimizer'):
            raise ValueError(f'{path.kind} hold no optimizer state; save with save_state')
        return path


class LoadModelBody(NewModelBody, LoadedWeights):
    """Body of `load_weights` for a new model."""

    base_model: BaseModelName | None = None
    weights_access_token: Annotated[
        None, not_served('is not supported; weights of another account can be loaded once they are published')
    ] = None


class LoadWeightsBody(OperationBody, LoadedWeights):
    """Body of `load_weights` for an existing model."""


class ModelBody(TinkerModel):
    """Body that names a model."""

    model_id: ModelId


class WeightsBody(TinkerModel):
    """Body that names saved weights."""

    tinker_path: WeightsPathField


@dataclass(frozen=True)
class ModelRequest:
    """Request for a new model."""

    body: NewModelBody
    lora_config: training_config_pb2.LoraConfig | None = None
    """None uses the configuration of the saved weights."""
    path: WeightsPath | None = None
    """Saved weights that the model starts from."""
    is_optimizer_included: bool = False

    def native(self, base_model: str) -> adapter_service_pb2.CreateAdapterRequest:
        return adapter_service_pb2.CreateAdapterRequest(
            request_id=self.body.model_id,
            adapter_id=self.body.model_id,
            session_id=self.body.session_id,
            base_model=base_model,
            lora_config=self.lora_config,
            training_config=training_config_pb2.TrainingConfig(optimizer=default_optimizer()),
            user_metadata=self.body.user_metadata,
            checkpoint_path=self.path.native if self.path else '',
            is_optimizer_included=self.is_optimizer_included,
        )


def native_lora_config(given: LoraConfig, *, is_unembed_trained: bool) -> training_config_pb2.LoraConfig:
    """Return the native LoRA configuration; `train_unembed` is ignored unless `is_unembed_trained`."""
    switches = {name: getattr(given, name) for name in _GROUPS if name != 'train_unembed' or is_unembed_trained}
    if not any(switches.values()):
        raise InvalidField('lora_config.train_mlp', f'at least one of {", ".join(switches)} must be true')
    targets = [_GROUPS[name] for name, is_trained in switches.items() if is_trained]
    return training_config_pb2.LoraConfig(
        lora_rank=given.rank, lora_alpha=LORA_ALPHA, target_modules=targets, seed=given.seed
    )


def trained_groups(targets: Collection[str]) -> dict[str, bool | None]:
    """Return the client's switches for target modules; all None if `targets` is empty or has other modules."""
    if not targets or not _GROUP_NAMES.issuperset(targets):
        return dict.fromkeys(_GROUPS)
    is_all = 'all-linear' in targets
    return {name: group in targets or (is_all and group != 'output-head') for name, group in _GROUPS.items()}


class TinkerModelRoutes:
    """Routes of models."""

    def __init__(
        self, operations: Operations, *, base_models: BaseModels, lookups: GrpcLookups, is_unembed_trained: bool
    ) -> None:
        self._operations = operations
        self._base_models = base_models
        self._lookups = lookups
        self._is_unembed_trained = is_unembed_trained

    def routes(self) -> list[Route]:
        return [
            tinker_route('create_model', self._create, access=TRAIN),
            tinker_route('load_weights', self._load, access=TRAIN),
            tinker_route('unload_model', self._unload, access=TRAIN),
            tinker_route('create_custom_loss', self._refuse_custom_loss, access=TRAIN),
        ]

    async def _create(self, call: HttpCall) -> Response:
        body = await read_body(call, CreateModelBody)
        config = native_lora_config(body.lora_config, is_unembed_trained=self._is_unembed_trained)
        return await self._submit(ModelRequest(body, config), body.base_model, Verb.CREATE_MODEL)

    async def _load(self, call: HttpCall) -> Response:
        async with self._operations.positioned(call, read_object(call)) as body:
            if body.get('model_id') is not None:
                return await self._load_into(read_model(LoadWeightsBody, body))
        given = read_model(LoadModelBody, body)
        saved = await self._lookups.checkpoint(given.path.native)
        if given.optimizer and not saved.is_optimizer_included:
            raise InvalidField('path', 'holds no optimizer state; send "optimizer": false')
        request = ModelRequest(given, path=given.path, is_optimizer_included=given.optimizer)
        return await self._submit(request, given.base_model or saved.base_model, Verb.LOAD_MODEL)

    async def _load_into(self, given: LoadWeightsBody) -> Response:
        load = operation_pb2.Load(checkpoint_path=given.path.native, is_optimizer_included=given.optimizer)
        operation = operation_pb2.Operation(adapter_id=given.model_id, load=load)
        note = FutureNote(Verb.LOAD_WEIGHTS, {'path': str(given.path), 'model_id': given.model_id})
        # Weights that are still being saved may not exist yet; the model service looks them up when the operation runs.
        return acknowledged(await self._operations.submit(operation, given.seq_id, note))

    async def _submit(self, request: ModelRequest, base_model: str, verb: Verb) -> Response:
        model_id, session_id = request.body.model_id, request.body.session_id
        await self._operations.check_session(session_id)
        found = await self._base_models.get_trainable(base_model)
        rank = request.lora_config.lora_rank if request.lora_config else 0
        if found.max_lora_rank and rank > found.max_lora_rank:
            raise InvalidField('lora_config.rank', f'must be at most {found.max_lora_rank}, got {rank}')
        facts = {'base_model': found.name, **({'path': str(request.path)} if request.path else {})}
        future = FutureRequest(
            kind=CREATE_KIND,
            key=creation_key(model_id),
            payload=request.native(found.name).SerializeToString(deterministic=True),
            session_id=session_id,
            lane=model_id,
            position=0,
            note=str(FutureNote(verb, facts)),
            base_model=found.name,
        )
        return acknowledged(await self._operations.futures.submit(future))

    async def _unload(self, call: HttpCall) -> Response:
        model_id = (await read_body(call, ModelBody)).model_id
        request = adapter_service_pb2.DeleteAdapterRequest(adapter_id=model_id)
        future = FutureRequest(
            kind=DELETE_KIND,
            key=f'{model_id}:unload',
            payload=request.SerializeToString(deterministic=True),
            session_id=session_of(model_id),
            note=str(FutureNote(Verb.UNLOAD_MODEL, {'model_id': model_id})),
            base_model=await self._operations.base_model_of(model_id),
        )
        return acknowledged(await self._operations.futures.submit(future))

    async def _refuse_custom_loss(self, call: HttpCall) -> Response:
        await read_object(call)
        raise InvalidField('graph', 'is not supported; forward_backward_custom computes custom losses in the client')


class InfoRoutes:
    """Routes that describe models and saved weights."""

    def __init__(self, lookups: GrpcLookups, runs: SqlRunStore, *, tokenizers: Mapping[str, str]) -> None:
        """Create the routes; `tokenizers` maps base models to the hub ids of their tokenizers."""
        self._lookups = lookups
        self._runs = runs
        self._tokenizers = tokenizers

    def routes(self) -> list[Route]:
        return [
            tinker_route('get_info', self._show_model, access=TRAIN),
            tinker_route('weights_info', self._show_weights, access=TRAIN),
        ]

    async def _show_model(self, call: HttpCall) -> Response:
        model_id = (await read_body(call, ModelBody)).model_id
        adapter = await self._lookups.adapter(model_id)
        name, is_lora = shown_name(adapter.base_model), not adapter.HasField('full_parameters')
        # Clients cannot load a tokenizer from a folder of the server.
        tokenizer_id = self._tokenizers.get(adapter.base_model, name if name == adapter.base_model else None)
        return JsonResponse(
            {
                'model_id': adapter.adapter_id,
                'model_data': {'model_name': name, 'tokenizer_id': tokenizer_id},
                'model_name': name,
                'is_lora': is_lora,
                'lora_rank': adapter.lora_config.lora_rank if is_lora else None,
                'optimizer_config': _ADAMW,
                'type': 'get_info',
            }
        )

    async def _show_weights(self, call: HttpCall) -> Response:
        path = (await read_body(call, WeightsBody)).tinker_path
        saved = await self._lookups.checkpoint(path.native)
        run = await self._runs.get(current_caller().tenant_id, path.run_id)
        # A run that trains all parameters has the rank 0.
        rank = run.lora_rank if run else saved.lora_rank or None
        facts = {'base_model': shown_name(saved.base_model), 'is_lora': rank != 0, 'lora_rank': rank or None}
        return JsonResponse({**facts, **trained_groups(saved.target_modules), 'optimizer_config': _ADAMW})
