"""Changes to saved weights: deleted, published, given an end, copied."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from services.gateway.catalogue.checkpoints import Checkpoints
from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.http.fields import text, whole
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.paths import WeightsPath, parse_path, path_of_native
from services.gateway.tinker.ports import FindSession
from services.gateway.tinker.queries import path_of
from services.gateway.tinker.routes import CHECKPOINTS, tinker_route
from services.gateway.tinker.runs import model_id_of
from services.kit.errors import InvalidField
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import text_from_proto

_ONE = 'training_runs/{run_id}/checkpoints/{kind}/{name}'
_TTL_SECONDS = whole(1, 10 * 366 * 24 * 3600)
_KEY_LENGTH = 256
_SEQ_ID = whole(0, (1 << 31) - 1)
_short_text = bounded_text(1, 128)


@dataclass(frozen=True)
class CopyOrder:
    """What is to be copied, and into which model of which session; of none where the id is empty."""

    source: WeightsPath
    session_id: str
    model_seq_id: int
    ttl: timedelta | None


class CheckpointRoutes:
    """Serves them."""

    def __init__(self, checkpoints: Checkpoints, *, find_session: FindSession) -> None:
        """Change and copy with `checkpoints`, into sessions that `find_session` finds."""
        self._checkpoints = checkpoints
        self._find_session = find_session

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route(_ONE, self._delete, access=CHECKPOINTS, http_method='DELETE'),
            tinker_route(f'{_ONE}/publish', self._publish, access=CHECKPOINTS),
            tinker_route(f'{_ONE}/publish', self._unpublish, access=CHECKPOINTS, http_method='DELETE'),
            tinker_route(f'{_ONE}/ttl', self._set_ttl, access=CHECKPOINTS, http_method='PUT'),
            tinker_route('copy_weights', self._copy, access=CHECKPOINTS),
        ]

    async def _delete(self, call: HttpCall) -> Response:
        await self._checkpoints.delete(current_caller(), path_of(call).native)
        return JsonResponse({'type': 'delete_checkpoint'})

    async def _publish(self, call: HttpCall) -> Response:
        return await self._set_public(call, is_public=True)

    async def _unpublish(self, call: HttpCall) -> Response:
        return await self._set_public(call, is_public=False)

    async def _set_public(self, call: HttpCall, *, is_public: bool) -> Response:
        await self._checkpoints.set_public(path_of(call).native, is_public=is_public)
        return JsonResponse({'public': is_public})

    async def _set_ttl(self, call: HttpCall) -> Response:
        path = path_of(call)
        ttl = await read_body(call, lambda body: _ttl_of(Fields(body)))
        await self._checkpoints.set_ttl(path.native, ttl)
        return JsonResponse({'type': 'set_checkpoint_ttl'})

    async def _copy(self, call: HttpCall) -> Response:
        order = await read_body(call, copy_order)
        run_id = ''
        if order.session_id:
            await self._find_session(order.session_id)
            run_id = model_id_of(order.session_id, order.model_seq_id)
        copy = await self._checkpoints.copy(
            current_caller(),
            order.source.native,
            name=order.source.native_name,
            run_id=run_id,
            key=_key_of(call),
            ttl=order.ttl,
        )
        return JsonResponse({'tinker_path': str(path_of_native(copy.path))})


def _key_of(call: HttpCall) -> str:
    """Return what a client names this request by; empty where it does not."""
    key = call.headers.get('x-idempotency-key', '')
    return text_from_proto(key, 'x-idempotency-key', limit=_KEY_LENGTH)


def copy_order(body: dict[str, Any]) -> CopyOrder:
    """Return what is to be copied.

    Raises:
        InvalidField: a field is wrong, or the weights are to be read with another account's token.
    """
    fields = Fields(body)
    if 'weights_access_token' in fields:
        problem = 'weights of another account are copied here once it has published them, not by a token'
        raise InvalidField('weights_access_token', problem)
    # A project is no place of its own here: a copy for one is a run of its own.
    fields.get('destination_project_id', text, '')
    session_id = fields.get('session_id', _short_text, '')
    seq_id = fields.need('model_seq_id', _SEQ_ID) if session_id else 0
    return CopyOrder(fields.need('source_path', parse_path), session_id, seq_id, _ttl_of(fields))


def _ttl_of(fields: Fields) -> timedelta | None:
    """Return how long weights are to be kept from now on; None: for ever."""
    return timedelta(seconds=fields.need('ttl_seconds', _TTL_SECONDS)) if 'ttl_seconds' in fields else None
