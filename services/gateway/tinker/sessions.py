"""Routes that create, renew, finish, list, search and describe client sessions, and assign them to projects."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, cast

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from twinkle_services.gateway.catalogue.paths import path_of_native
from twinkle_services.gateway.catalogue.sql import SqlBrowser
from twinkle_services.gateway.errors import SessionNotFound
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, Response, Route
from twinkle_services.gateway.http.validation import TextLabels
from twinkle_services.gateway.paging import Cursor, Page
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.gateway.sessions.rules import FinishReason, Session, SessionRequest, SessionState
from twinkle_services.gateway.sessions.sessions import Sessions
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.tinker.bodies import (
    Labels,
    ShortText,
    TinkerModel,
    labels_to_json,
    read_body,
    time_to_json,
)
from twinkle_services.gateway.tinker.routes import CATALOGUE, SESSIONS, checked_query_of, slice_of, tinker_route
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.context import current_caller

SAVED_LABEL = 'twinkle:saved_checkpoints'
"""Label with the paths in `Session.checkpoint_paths`, converted to Tinker paths and separated by spaces."""
_MAX_TAG_CHARACTERS = 4096
"""Maximum number of characters of all tags, as JSON."""
_UNEMBED_NOTICE = 'train_unembed has no effect on this server: the output head has the weights of the base model'
_MAX_READ = 5000
"""Maximum number of sessions that one search reads; the next page continues after them, even if none matched."""
_PAGE_SIZE = 500
_OWN_LABELS = {'display_name': 'tinker:display_name', 'tags': 'tinker:tags'}
"""Labels that store the fields that only Tinker's sessions have, by field."""
_REASONS = {FinishReason.SUCCESS: 'success', FinishReason.FAILED: 'errored', FinishReason.INTERRUPTED: 'interrupted'}
_FINISH_REASONS = {name: reason for reason, name in _REASONS.items()}


class SessionBody(TinkerModel):
    """Body of `create_session`."""

    user_metadata: Labels = Field(default_factory=dict[str, str])
    tags: Annotated[list[ShortText], Field(fail_fast=True)] = Field(default_factory=list[str])
    display_name: ShortText = ''
    sdk_version: ShortText = ''
    project_id: ShortText = ''

    def request(self, request_id: str) -> SessionRequest:
        tags = json.dumps(self.tags) if self.tags else ''
        if len(tags) > _MAX_TAG_CHARACTERS:
            raise InvalidField('tags', f'must have at most {_MAX_TAG_CHARACTERS} characters in total')
        own = {'display_name': self.display_name, 'tags': tags}
        return SessionRequest(
            request_id=request_id,
            client=f'tinker {self.sdk_version}'.strip()[:128],
            user_metadata={**self.user_metadata, **{_OWN_LABELS[name]: value for name, value in own.items() if value}},
            project_id=self.project_id,
        )


class HeartbeatBody(TinkerModel):
    """Body of `session_heartbeat`."""

    session_id: Annotated[str, Field(min_length=1, max_length=128)]


class SessionEnd(TinkerModel):
    """Reason for the end of a session, as the client reports it."""

    type: str = 'success'

    @field_validator('type')
    @classmethod
    def _check_type(cls, kind: str) -> str:
        if kind not in _FINISH_REASONS:
            raise ValueError(f'must be one of {", ".join(_FINISH_REASONS)}')
        return kind


class FinishBody(TinkerModel):
    """Body of `sessions/{session_id}/finish`."""

    reason: SessionEnd = SessionEnd()


class ProjectBody(TinkerModel):
    """Body of `sessions/{session_id}/project`."""

    project_id: ShortText = ''


class SessionRoutes:
    """Routes that create, renew and finish sessions."""

    def __init__(self, sessions: Sessions, *, is_unembed_trained: bool) -> None:
        """Create the routes; new sessions receive a notice unless `is_unembed_trained`."""
        self._sessions = sessions
        self._notice = {} if is_unembed_trained else {'info_message': _UNEMBED_NOTICE}

    def routes(self) -> list[Route]:
        return [
            tinker_route('create_session', self._create, access=SESSIONS),
            tinker_route('session_heartbeat', self._heartbeat, access=SESSIONS),
            tinker_route('sessions/{session_id}/finish', self._finish, access=SESSIONS),
        ]

    async def _create(self, call: HttpCall) -> Response:
        # The SDK sends the same key with all HTTP retries of a call.
        request_id = call.headers.get('x-idempotency-key', '')[:256] or new_id('rq')
        request = (await read_body(call, SessionBody)).request(request_id)
        session = await self._sessions.create(current_caller(), request)
        return JsonResponse({'session_id': session.session_id, 'type': 'create_session', **self._notice})

    async def _heartbeat(self, call: HttpCall) -> Response:
        given = await read_body(call, HeartbeatBody)
        await self._sessions.heartbeat(current_caller(), given.session_id)
        return JsonResponse({'type': 'session_heartbeat'})

    async def _finish(self, call: HttpCall) -> Response:
        given = await read_body(call, FinishBody)
        session_id = call.path_values['session_id']
        await self._sessions.finish(current_caller(), session_id, reason=_FINISH_REASONS[given.reason.type])
        return JsonResponse({'session_id': session_id})


def _parse_time(value: Any) -> datetime:
    try:
        return datetime.fromisoformat(value).astimezone(UTC)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError('must be a time from the previous page') from error


def _text_set(value: Any) -> frozenset[str]:
    if not isinstance(value, list) or not {str}.issuperset(map(type, cast('list[Any]', value))):
        raise ValueError('must be a list of strings')
    return frozenset(cast('list[str]', value))


_Text = Annotated[str, Field(min_length=1, max_length=1024)]
_TextSet = Annotated[frozenset[str], PlainValidator(_text_set)]


class SearchOwner(TinkerModel):
    """Owners of the sessions that are searched."""

    type: Literal['own', 'accessible', 'user'] = 'own'
    owner_urns: _TextSet | None = None

    @field_validator('owner_urns', mode='before')
    @classmethod
    def _ignore(cls, urns: Any, info: ValidationInfo) -> Any:
        """Ignore the list unless the search is for users."""
        return urns if info.data.get('type') == 'user' else None


class SearchStatus(TinkerModel):
    """Accepted status of a session."""

    type: Literal['active', 'cancelled', 'failed', 'client_finished']
    reasons: _TextSet | None = None
    """Accepted finish reasons; None accepts all."""

    def matches(self, session: Session) -> bool:
        return _status_kind(session) == self.type and (self.reasons is None or _finish_kind(session) in self.reasons)


class SearchCursor(TinkerModel):
    """Last session of the previous page."""

    last_created_at: Annotated[datetime, PlainValidator(_parse_time)]
    last_session_id: _Text


class SearchBody(TinkerModel):
    """Body of `sessions/search`; a session must meet all conditions that are set."""

    owner: SearchOwner = SearchOwner()
    session_id: _Text | None = None
    display_name: _Text | None = None
    """Words of the name. If `session_id` is also set, a session needs to match only one of the two fields."""
    user_metadata: TextLabels = Field(default_factory=dict[str, str])
    project_ids: _TextSet | None = None
    statuses: Annotated[list[SearchStatus], Field(fail_fast=True)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None

    def matches(self, session: Session) -> bool:
        labels, owners = session.user_metadata, self.owner.owner_urns
        return (
            self._matches_name(session)
            and all(labels.get(name) == value for name, value in self.user_metadata.items())
            and (self.project_ids is None or session.project_id in self.project_ids)
            and (owners is None or session.tenant_id in owners)
            and (self.statuses is None or any(status.matches(session) for status in self.statuses))
        )

    def _matches_name(self, session: Session) -> bool:
        if not self.session_id and not self.display_name:
            return True
        name = _own_label(session, 'display_name').casefold()
        words = (self.display_name or '').casefold().split()
        return session.session_id == self.session_id or (bool(words) and all(word in name for word in words))


class SessionSearch:
    """Searches the sessions of the current caller, newest first."""

    def __init__(self, browser: SqlBrowser, store: SqlSessionStore, sessions: Sessions) -> None:
        self._browser = browser
        self._store = store
        self._sessions = sessions

    async def __call__(self, search: SearchBody) -> dict[str, Any]:
        """Return one page of matching sessions as a JSON document."""
        found: list[Session] = []
        cursor = search.cursor
        after = Cursor(cursor.last_created_at, cursor.last_session_id) if cursor else None
        read, is_end = 0, False
        while len(found) < search.limit and read < _MAX_READ and not is_end:
            listed = await self._store.list_newest(current_caller().tenant_id, Page(size=_PAGE_SIZE, after=after))
            is_end = listed.next_cursor is None
            for session in listed.items:
                if len(found) == search.limit:
                    is_end = False
                    break
                read, after = read + 1, Cursor(session.create_time, session.session_id)
                found += [session] if search.matches(session) and await self._still_matches(search, session) else []
        documents = [_session_to_json(session, await self._stored(session)) for session in found]
        return {'sessions': documents, 'next_cursor': None if is_end or after is None else _cursor_to_json(after)}

    async def _still_matches(self, search: SearchBody, session: Session) -> bool:
        """Check the current status, because the session may have expired after its status was stored."""
        if search.statuses is None or _status_kind(session) != 'active':
            return True
        try:
            return search.matches(await self._sessions.get(current_caller(), session.session_id))
        except SessionNotFound:
            return False

    async def _stored(self, session: Session) -> tuple[int, int]:
        return await self._browser.stored(session.tenant_id, session_id=session.session_id)


def _session_to_json(session: Session, stored: tuple[int, int]) -> dict[str, Any]:
    """Convert a session to JSON; `stored` contains the number and the total bytes of the session's checkpoints."""
    return {
        'session_id': session.session_id,
        'created_at': time_to_json(session.create_time),
        'owner': session.tenant_id,
        'project_id': session.project_id,
        'status': _status(session),
        'checkpoints_count': stored[0],
        'checkpoint_storage_bytes': stored[1],
        'display_name': _own_label(session, 'display_name') or None,
        'user_metadata': labels_to_json(session.user_metadata),
    }


def _status_kind(session: Session) -> str:
    """Return the kind of a session's status; empty for an expired session."""
    kinds = {SessionState.ACTIVE: 'active', SessionState.FINISHED: 'client_finished'}
    return kinds.get(session.state, '')


def _finish_kind(session: Session) -> str:
    return _REASONS[session.finish_reason or FinishReason.SUCCESS]


def _own_label(session: Session, name: str) -> str:
    """Return a field of `_OWN_LABELS`; empty if the client did not send it."""
    return session.user_metadata.get(_OWN_LABELS[name], '')


def _status(session: Session) -> dict[str, Any] | None:
    kind = _status_kind(session)
    if kind == 'client_finished':
        return {'type': kind, 'reason': {'type': _finish_kind(session)}}
    return {'type': kind} if kind else None


def _cursor_to_json(cursor: Cursor) -> dict[str, Any]:
    return {'last_created_at': time_to_json(cursor.create_time), 'last_session_id': cursor.item_id}


class SessionListRoutes:
    """Routes that list, describe and search the sessions of a tenant, and assign them to projects."""

    def __init__(
        self, browser: SqlBrowser, sessions: Sessions, search: SessionSearch, *, handles: SqlHandleStore
    ) -> None:
        self._browser = browser
        self._sessions = sessions
        self._search_sessions = search
        self._handles = handles

    def routes(self) -> list[Route]:
        return [
            tinker_route('sessions', self._list, access=CATALOGUE, http_method='GET'),
            tinker_route('sessions/{session_id}', self._show, access=CATALOGUE, http_method='GET'),
            tinker_route('sessions/{session_id}/trace_export', self._export, access=CATALOGUE, http_method='GET'),
            tinker_route('sessions/search', self._search, access=CATALOGUE),
            tinker_route('sessions/{session_id}/project', self._assign, access=SESSIONS, http_method='PUT'),
        ]

    async def _list(self, call: HttpCall) -> Response:
        query = checked_query_of(call)
        part = slice_of(query, limit=20)
        found = await self._browser.sessions(current_caller().tenant_id, part, project_id=query.get('project_id', ''))
        return JsonResponse({'sessions': [session.session_id for session in found.items]})

    async def _show(self, call: HttpCall) -> Response:
        checked_query_of(call)
        session = await self._sessions.get(current_caller(), call.path_values['session_id'])
        run_ids = await self._browser.run_ids(session.tenant_id, session_id=session.session_id)
        handles = await self._handles.list_of_session(session.tenant_id, session.session_id)
        saved = [str(path_of_native(path)) for path in session.checkpoint_paths]
        labels = {**session.user_metadata, **({SAVED_LABEL: ' '.join(saved)} if saved else {})}
        return JsonResponse(
            {
                'training_run_ids': list(run_ids),
                'sampler_ids': [handle.handle_id for handle in handles],
                'user_metadata': labels_to_json(labels),
                'display_name': _own_label(session, 'display_name') or None,
            }
        )

    async def _search(self, call: HttpCall) -> Response:
        return JsonResponse(await self._search_sessions(await read_body(call, SearchBody)))

    async def _assign(self, call: HttpCall) -> Response:
        given = await read_body(call, ProjectBody)
        session_id = call.path_values['session_id']
        session = await self._sessions.assign_project(current_caller(), session_id, project_id=given.project_id)
        return JsonResponse({'session_id': session.session_id, 'project_id': session.project_id})

    async def _export(self, call: HttpCall) -> Response:
        await self._sessions.get(current_caller(), call.path_values['session_id'])
        return JsonResponse({'status': 'failed', 'error': 'this server does not record traces of sessions'})
