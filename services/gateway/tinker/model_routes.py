"""Models in training: made, of fresh or of saved weights, shown and given up."""

from services.gateway.futures.rules import FutureRequest
from services.gateway.http.call import HttpCall, Response, Route
from services.gateway.http.fields import text
from services.gateway.tinker.base_models import BaseModels
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.fields import Fields
from services.gateway.tinker.model_request import ModelRequest, fresh_model, saved_model
from services.gateway.tinker.notes import CREATE, DELETE, Note, Verb
from services.gateway.tinker.operations import Operations, acknowledged, check_model_id, check_seq_id
from services.gateway.tinker.ports import Lookups
from services.gateway.tinker.routes import TRAIN, tinker_route
from services.gateway.tinker.runs import KnownModels, creation_key, session_of
from services.gateway.tinker.weights_routes import load_note, load_of
from services.kit.errors import InvalidField
from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.api.model.v1 import adapter_service_pb2


class TinkerModelRoutes:
    """Serves them."""

    def __init__(
        self,
        operations: Operations,
        known: KnownModels,
        *,
        base_models: BaseModels,
        lookups: Lookups,
        is_unembed_trained: bool,
    ) -> None:
        """Create the routes.

        Args:
            operations: Submits futures.
            known: Models of the caller.
            base_models: Base models that can be trained.
            lookups: Client for saved weights.
            is_unembed_trained: Whether `train_unembed` adds an adapter to the output head.
        """
        self._known = known
        self._operations = operations
        self._base_models = base_models
        self._lookups = lookups
        self._is_unembed_trained = is_unembed_trained

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('create_model', self._create, access=TRAIN),
            tinker_route('load_weights', self._load, access=TRAIN),
            tinker_route('unload_model', self._unload, access=TRAIN),
            tinker_route('create_custom_loss', self._refuse_custom_loss, access=TRAIN),
        ]

    async def _create(self, call: HttpCall) -> Response:
        request = await read_body(call, lambda body: fresh_model(body, is_unembed_trained=self._is_unembed_trained))
        return await self._submit(request, request.base_model, Verb.CREATE_MODEL)

    async def _load(self, call: HttpCall) -> Response:
        fields = await read_body(call, Fields)
        if 'model_id' in fields:
            async with self._operations.placed(fields.raw('model_id'), fields.raw('seq_id')):
                return await self._load_into(fields)
        request = saved_model(fields)
        assert request.path is not None  # noqa: S101 (saved_model always has one)
        saved = await self._saved(request.path.native)
        if request.is_optimizer_included and not saved.is_optimizer_included:
            raise InvalidField('path', 'holds no optimizer state')
        return await self._submit(request, request.base_model or saved.base_model, Verb.LOAD_MODEL)

    async def _load_into(self, fields: Fields) -> Response:
        path, operation = load_of(fields)
        note = load_note(path, model_id=operation.adapter_id)
        # Saved just before, it may not be there yet: the trainer looks for it when its turn comes.
        return acknowledged(await self._operations.submit(operation, fields.need('seq_id', check_seq_id), note))

    async def _submit(self, request: ModelRequest, base_model: str, verb: Verb) -> Response:
        await self._known.check_open(request.session_id)
        known = await self._base_models.need_trainable(base_model, 'base_model')
        rank = request.lora_config.lora_rank if request.lora_config else 0
        if known.max_lora_rank and rank > known.max_lora_rank:
            raise InvalidField('lora_config.rank', f'must be at most {known.max_lora_rank}, got {rank}')
        facts = {'base_model': known.name, **({'path': str(request.path)} if request.path else {})}
        order = FutureRequest(
            kind=CREATE,
            key=creation_key(request.model_id),
            payload=request.native(known.name).SerializeToString(deterministic=True),
            session_id=request.session_id,
            lane=request.model_id,
            position=0,
            note=str(Note(verb, facts)),
            base_model=known.name,
        )
        return acknowledged(await self._operations.futures.submit(order))

    async def _unload(self, call: HttpCall) -> Response:
        wanted = await read_body(call, lambda body: Fields(body).need('model_id', check_model_id))
        base_model = await self._known.base_model_of(wanted)
        order = FutureRequest(
            kind=DELETE,
            key=f'{wanted}:unload',
            payload=adapter_service_pb2.DeleteAdapterRequest(adapter_id=wanted).SerializeToString(deterministic=True),
            session_id=session_of(wanted),
            note=str(Note(Verb.UNLOAD_MODEL, {'model_id': wanted})),
            base_model=base_model,
        )
        return acknowledged(await self._operations.futures.submit(order))

    async def _refuse_custom_loss(self, call: HttpCall) -> Response:
        await read_body(call, lambda body: Fields(body).get('name', text, ''))
        problem = 'custom losses are computed by the client here: use forward_backward_custom'
        raise InvalidField('graph', problem)

    async def _saved(self, native_path: str) -> checkpoint_pb2.Checkpoint:
        return checkpoint_pb2.Checkpoint.FromString(await self._lookups.checkpoint(native_path))
