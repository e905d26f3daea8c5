"""Shows models, and saved weights: what a client must know before it works with them."""

from collections.abc import Mapping

from services.gateway.catalogue.ports import RunStore
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.fields import Fields
from services.gateway.tinker.operations import check_model_id
from services.gateway.tinker.paths import parse_path
from services.gateway.tinker.ports import Lookups
from services.gateway.tinker.routes import TRAIN, tinker_route
from services.kit.rpc.context import current_caller
from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.api.model.v1 import adapter_pb2

_ADAMW = {'type': 'adamw'}


class InfoRoutes:
    """Serves them."""

    def __init__(self, lookups: Lookups, runs: RunStore, *, tokenizers: Mapping[str, str]) -> None:
        """Find models and weights by `lookups`.

        Args:
            lookups: asks their owners.
            runs: knows the rank of the run that weights are of.
            tokenizers: where those of base models are, where that is not under their own names.
        """
        self._lookups = lookups
        self._runs = runs
        self._tokenizers = tokenizers

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('get_info', self._show_model, access=TRAIN),
            tinker_route('weights_info', self._show_weights, access=TRAIN),
        ]

    async def _show_model(self, call: HttpCall) -> Response:
        model_id = await read_body(call, lambda body: Fields(body).need('model_id', check_model_id))
        adapter = adapter_pb2.Adapter.FromString(await self._lookups.adapter(model_id))
        name, is_lora = adapter.base_model, not adapter.HasField('full_parameters')
        return JsonResponse(
            {
                'model_id': adapter.adapter_id,
                'model_data': {'model_name': name, 'tokenizer_id': self._tokenizers.get(name, name)},
                'model_name': name,
                'is_lora': is_lora,
                'lora_rank': adapter.lora_config.lora_rank if is_lora else None,
                'optimizer_config': _ADAMW,
                'type': 'get_info',
            }
        )

    async def _show_weights(self, call: HttpCall) -> Response:
        path = await read_body(call, lambda body: Fields(body).need('tinker_path', parse_path))
        saved = checkpoint_pb2.Checkpoint.FromString(await self._lookups.checkpoint(path.native))
        run = await self._runs.get(current_caller().tenant_id, path.run_id)
        # A run that trains the base model's own weights has the rank 0.
        rank = run.lora_rank if run else saved.lora_rank or None
        facts = {'base_model': saved.base_model, 'is_lora': rank != 0, 'lora_rank': rank or None}
        return JsonResponse({**facts, 'optimizer_config': _ADAMW})
