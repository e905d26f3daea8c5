"""Models in training, by their ids: what must be known of one before an operation on it is queued."""

from collections import OrderedDict

from services.gateway.errors import FutureExpired, FutureNotFound, SessionFinished, SessionNotFound
from services.gateway.futures.futures import Futures
from services.gateway.futures.rules import FutureState, future_id_of
from services.gateway.sessions.rules import SessionState
from services.gateway.tinker.notes import note_of
from services.gateway.tinker.ports import FindSession, Lookups
from services.kit.errors import AdapterNotFound
from services.kit.rpc.context import current_caller
from twinkle.api.model.v1 import adapter_pb2

_REMEMBERED = 4096
_BETWEEN = ':train:'


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """Return the id of a session's model; it is the adapter's, too."""
    return f'{session_id}{_BETWEEN}{model_seq_id}'


def session_of(model_id: str) -> str:
    """Return the session a model belongs to; empty for an adapter that was made by other means."""
    return model_id.rpartition(_BETWEEN)[0]


def creation_key(model_id: str) -> str:
    """Return the key of the future that makes a model."""
    return f'{model_id}:0'


class KnownModels:
    """Knows models.

    Concurrency: all verbs from the event loop, for the current caller.
    """

    def __init__(self, futures: Futures, lookups: Lookups, *, find_session: FindSession) -> None:
        """Look models up among `futures`, which make them, and by `lookups` at the trainer."""
        self._futures = futures
        self._lookups = lookups
        self._find_session = find_session
        self._names: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def base_model_of(self, model_id: str) -> str:
        """Return the name of a model's base model, also of one that is still being made; empty: not known yet.

        Raises:
            AdapterNotFound: the caller has no such model.
            DomainError: it could not be looked up.
        """
        key = (current_caller().tenant_id, model_id)
        if key not in self._names:
            name = await self._look_up(model_id)
            if name:
                self._names[key] = name
            if len(self._names) > _REMEMBERED:
                self._names.popitem(last=False)
            return name
        self._names.move_to_end(key)
        return self._names[key]

    async def check_open(self, session_id: str) -> None:
        """Check that a session takes further work; one that is only silent does.

        Raises:
            SessionNotFound: the caller has no such session.
            SessionFinished: its client said that it was done.
        """
        session = await self._find_session(session_id)
        if session.state is SessionState.FINISHED:
            raise SessionFinished(session_id)

    async def check_open_for(self, model_id: str) -> None:
        """Check that a model's session takes further work; a model of no session needs none.

        Raises:
            SessionFinished: its client said that it was done.
        """
        try:
            await self.check_open(session_of(model_id))
        except SessionNotFound:
            return

    async def _look_up(self, model_id: str) -> str:
        future_id = future_id_of(current_caller().tenant_id, creation_key(model_id))
        try:
            creation = await self._futures.wait(future_id, seconds=0)
        except (FutureNotFound, FutureExpired):
            return await self._adapter_base(model_id)
        if creation.state is FutureState.FAILED:
            raise AdapterNotFound(model_id)
        return str(note_of(creation).facts.get('base_model', ''))

    async def _adapter_base(self, model_id: str) -> str:
        return adapter_pb2.Adapter.FromString(await self._lookups.adapter(model_id)).base_model
