"""A client's session: begun, kept alive, ended."""

import json
from collections.abc import Mapping
from typing import Any

from services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from services.gateway.http.fields import items, mapping, text
from services.gateway.sessions.rules import FinishReason, SessionRequest
from services.gateway.sessions.sessions import Sessions
from services.gateway.tinker.bodies import read_body
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.routes import SESSIONS, tinker_route
from services.kit.errors import InvalidField
from services.kit.ids import new_id
from services.kit.rpc.context import current_caller

OWN_LABELS = {'display_name': 'tinker:display_name', 'tags': 'tinker:tags'}
"""Labels of a session that hold what Tinker's clients tell beside theirs."""
_MAX_LABELS, _LABEL_NAME, _LABEL_VALUE = 60, 256, 4096
_REASONS = {
    'success': FinishReason.SUCCESS,
    'errored': FinishReason.FAILED,
    'interrupted': FinishReason.INTERRUPTED,
}
_UNEMBED_NOTICE = 'train_unembed has no effect on this server: the output head keeps the weights of the base model'
_session_id = bounded_text(1, 128)
_short_text = bounded_text(0, 1024)


class SessionRoutes:
    """Serves them."""

    def __init__(self, sessions: Sessions, *, is_unembed_trained: bool) -> None:
        self._sessions = sessions
        self._notice = {} if is_unembed_trained else {'info_message': _UNEMBED_NOTICE}

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            tinker_route('create_session', self._create, access=SESSIONS),
            tinker_route('session_heartbeat', self._heartbeat, access=SESSIONS),
            tinker_route('sessions/{session_id}/finish', self._finish, access=SESSIONS),
        ]

    async def _create(self, call: HttpCall) -> Response:
        # The client's own key is the same for the repeats of one call, and another one for each attempt above them.
        request_id = call.headers.get('x-idempotency-key', '')[:256] or new_id('rq')
        order = await read_body(call, lambda body: session_order(body, request_id=request_id))
        session = await self._sessions.create(current_caller(), order)
        return JsonResponse({'session_id': session.session_id, 'type': 'create_session', **self._notice})

    async def _heartbeat(self, call: HttpCall) -> Response:
        session_id = await read_body(call, lambda body: Fields(body).need('session_id', _session_id))
        await self._sessions.heartbeat(current_caller(), session_id)
        return JsonResponse({'type': 'session_heartbeat'})

    async def _finish(self, call: HttpCall) -> Response:
        reason = await read_body(call, finish_reason)
        session_id = call.path_values['session_id']
        await self._sessions.finish(current_caller(), session_id, reason=reason)
        return JsonResponse({'session_id': session_id})


def session_order(body: Mapping[str, Any], *, request_id: str) -> SessionRequest:
    """Return what session is asked for.

    Raises:
        InvalidField: a field is wrong.
    """
    fields = Fields(body)
    labels = labels_of(fields, 'user_metadata')
    tags = [_short_text(tag, f'tags[{place}]') for place, tag in enumerate(fields.get('tags', items, []))]
    own = {
        'display_name': fields.get('display_name', _short_text, ''),
        'tags': json.dumps(tags) if tags else '',
    }
    if len(own['tags']) > _LABEL_VALUE:
        raise InvalidField('tags', f'must have at most {_LABEL_VALUE} characters together')
    labels.update({OWN_LABELS[name]: value for name, value in own.items() if value})
    version = fields.get('sdk_version', _short_text, '')
    return SessionRequest(
        request_id=request_id,
        client=f'tinker {version}'.strip()[:128],
        user_metadata=labels,
        project_id=fields.get('project_id', _short_text, ''),
    )


def finish_reason(body: Mapping[str, Any]) -> FinishReason:
    """Return how a session ended.

    Raises:
        InvalidField: it is none of the known ways.
    """
    kind = Fields(body).part('reason').get('type', text, 'success')
    if kind not in _REASONS:
        raise InvalidField('reason.type', f'must be one of {", ".join(_REASONS)}')
    return _REASONS[kind]


def labels_of(fields: Fields, name: str) -> dict[str, str]:
    """Return a client's own labels: texts as they are, other values as JSON.

    Raises:
        InvalidField: there are too many, or one is too long.
    """
    given = fields.get(name, mapping, {})
    path = fields.path_of(name)
    if len(given) > _MAX_LABELS:
        raise InvalidField(path, f'must have at most {_MAX_LABELS} entries')
    labels: dict[str, str] = {}
    for key, value in given.items():
        label = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if len(key) > _LABEL_NAME or len(label) > _LABEL_VALUE or any(character < ' ' for character in key + label):
            problem = f'names have at most {_LABEL_NAME} characters, values {_LABEL_VALUE}, none of them control ones'
            raise InvalidField(path, problem)
        if not key or key.startswith('tinker:'):
            raise InvalidField(path, 'names are not empty and do not begin with "tinker:"')
        labels[key] = label
    return labels
