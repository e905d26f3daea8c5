"""Finds sessions by what was said of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from services.gateway.errors import SessionNotFound
from services.gateway.http.fields import items, text, whole
from services.gateway.http.fields import labels as text_labels
from services.gateway.paging import Cursor, Page
from services.gateway.sessions.ports import SessionStore
from services.gateway.sessions.rules import Session
from services.gateway.tinker.catalogue_answers import (
    finish_kind,
    moment_to_json,
    own_label,
    session_to_json,
    status_kind,
)
from services.gateway.tinker.catalogue_ports import Browser
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.ports import FindSession
from services.kit.errors import InvalidField
from services.kit.rpc.context import current_caller

MOST_READ = 5000
"""Sessions that one search looks at; where none is found among them, the next page goes on behind them."""
_PAGE_SIZE = 500
_STATUSES = ('active', 'cancelled', 'failed', 'client_finished')
_LIMIT = whole(1, 200)
_short_text = bounded_text(1, 1024)


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is looked for; every condition must hold."""

    session_id: str = ''
    display_name: str = ''
    """Words of it; a session with this id or this name is meant where both are given."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    project_ids: frozenset[str] | None = None
    statuses: tuple[tuple[str, frozenset[str] | None], ...] | None = None
    """Kinds of states, each with the ways to end that are meant; None: all."""
    owners: frozenset[str] | None = None
    limit: int = 50
    after: Cursor | None = None

    def is_met_by(self, session: Session) -> bool:
        """Return whether a session is one of those looked for."""
        labels = session.user_metadata
        return (
            self._is_named(session)
            and all(labels.get(name) == value for name, value in self.user_metadata.items())
            and (self.project_ids is None or session.project_id in self.project_ids)
            and (self.owners is None or session.tenant_id in self.owners)
            and (self.statuses is None or any(_has(session, *status) for status in self.statuses))
        )

    def _is_named(self, session: Session) -> bool:
        if not self.session_id and not self.display_name:
            return True
        name = own_label(session, 'display_name').casefold()
        words = self.display_name.casefold().split()
        return session.session_id == self.session_id or (bool(words) and all(word in name for word in words))


class SessionSearch:
    """Looks through the sessions of the current caller, newest first."""

    def __init__(self, browser: Browser, sessions: SessionStore, *, find_session: FindSession) -> None:
        """Look through `sessions`; `find_session` shows one as it is now, `browser` what it stored."""
        self._browser = browser
        self._sessions = sessions
        self._find_session = find_session

    async def __call__(self, search: Search) -> dict[str, Any]:
        """Return a page of what was found."""
        found: list[Session] = []
        after, read, is_end = search.after, 0, False
        while len(found) < search.limit and read < MOST_READ and not is_end:
            page = Page(size=_PAGE_SIZE, after=after)
            listed = await self._sessions.list_newest(current_caller().tenant_id, page)
            is_end = len(listed) <= _PAGE_SIZE
            for session in listed[:_PAGE_SIZE]:
                if len(found) == search.limit:
                    is_end = False
                    break
                read, after = read + 1, Cursor(session.create_time, session.session_id)
                found += [session] if search.is_met_by(session) and await self._is_still_met(search, session) else []
        answers = [session_to_json(session, stored=await self._stored(session)) for session in found]
        return {'sessions': answers, 'next_cursor': None if is_end or after is None else _cursor_to_json(after)}

    async def _is_still_met(self, search: Search, session: Session) -> bool:
        """Say whether the conditions hold now: a client may have fallen silent since the state was written down."""
        if search.statuses is None or status_kind(session) != 'active':
            return True
        try:
            return search.is_met_by(await self._find_session(session.session_id))
        except SessionNotFound:
            return False

    async def _stored(self, session: Session) -> tuple[int, int]:
        return await self._browser.stored(session.tenant_id, session_id=session.session_id)


def search_of(body: Mapping[str, Any]) -> Search:
    """Return what is looked for.

    Raises:
        InvalidField: a field is wrong.
    """
    fields = Fields(body)
    owner = fields.part('owner')
    kind = owner.get('type', text, 'own')
    if kind not in {'own', 'accessible', 'user'}:
        raise InvalidField('owner.type', 'must be one of own, accessible, user')
    return Search(
        session_id=fields.get('session_id', _short_text, ''),
        display_name=fields.get('display_name', _short_text, ''),
        user_metadata=fields.get('user_metadata', text_labels, {}),
        project_ids=_texts(fields, 'project_ids'),
        statuses=_statuses(fields),
        owners=_texts(owner, 'owner_urns') if kind == 'user' else None,
        limit=fields.get('limit', _LIMIT, 50),
        after=_cursor_of(fields),
    )


def _texts(fields: Fields, name: str) -> frozenset[str] | None:
    if name not in fields:
        return None
    return frozenset(text(value, fields.path_of(name)) for value in fields.need(name, items))


def _statuses(fields: Fields) -> tuple[tuple[str, frozenset[str] | None], ...] | None:
    if 'statuses' not in fields:
        return None
    found: list[tuple[str, frozenset[str] | None]] = []
    for place, value in enumerate(fields.need('statuses', items)):
        path = f'statuses[{place}]'
        if not isinstance(value, dict):
            raise InvalidField(path, 'must be an object')
        status = Fields(value, path)  # pyright: ignore[reportUnknownArgumentType]
        kind = status.need('type', text)
        if kind not in _STATUSES:
            raise InvalidField(status.path_of('type'), f'must be one of {", ".join(_STATUSES)}')
        found.append((kind, _texts(status, 'reasons')))
    return tuple(found)


def _has(session: Session, kind: str, reasons: frozenset[str] | None) -> bool:
    return status_kind(session) == kind and (reasons is None or finish_kind(session) in reasons)


def _cursor_of(fields: Fields) -> Cursor | None:
    if 'cursor' not in fields:
        return None
    cursor = fields.part('cursor')
    try:
        moment = datetime.fromisoformat(cursor.need('last_created_at', text))
        moment = moment.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidField('cursor.last_created_at', 'must be a moment, as the page before told it') from error
    return Cursor(moment, cursor.need('last_session_id', _short_text))


def _cursor_to_json(cursor: Cursor) -> dict[str, Any]:
    return {'last_created_at': moment_to_json(cursor.create_time), 'last_session_id': cursor.item_id}
