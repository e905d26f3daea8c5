"""The executor of training operations, each exactly once.

An operation gets the next number of its adapter, which is kept before it is sent. Whatever happens afterwards,
it is sent again under that number with the same content, and the model service answers from its record if it
had run. Only what the service says has *not* run under a number gets another one: the number went to another
caller's operation (SEQUENCE_REUSED), or those before it are gone (SEQUENCE_GAP). An operation that is refused
leaves its number free, and the next one of the lane takes it.
"""

from collections import OrderedDict

from services.gateway.futures.persistence import Persistence
from services.gateway.futures.ports import FutureStore
from services.gateway.futures.rules import Future
from services.gateway.futures.trainer_ports import Trainer
from services.kit.errors import Cancelled, DomainError
from services.kit.failpoints import reach

_REMEMBERED = 1024
_NOT_RUN = {'SEQUENCE_REUSED', 'SEQUENCE_GAP'}


class ExecuteOperation:
    """Implements `ports.Executor`. The lane of such a future is its adapter."""

    def __init__(self, trainer: Trainer, store: FutureStore, persistence: Persistence) -> None:
        """Run them with `trainer`, and keep their numbers in `store`."""
        self._trainer = trainer
        self._store = store
        self._persistence = persistence
        self._numbers: dict[str, int] = {}
        """Of those that were sent."""
        self._numbering: set[str] = set()
        """Those that certainly did not run: they have no number yet, or need another one."""
        self._stopped: set[str] = set()
        """Those of them that are not to run at all."""
        self._last: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()
        """By adapter, position and number of the last one that succeeded here: the next is taken without asking."""

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Return the serialized ExecuteResponse.

        Raises:
            DomainError: the operation failed, or was refused.
        """
        number, failures = future.number, 0
        lane = future.tenant_id, future.lane
        last = self._last_before(future)
        if number is None:
            number = await self._renumber(future, last=last, instead_of=None)
        while (answer := await self._send(future, payload, number)) is None:
            # Another caller's operation may be running under it: the adapter tells of it when it is done.
            number = await self._renumber(future, last=None, instead_of=number, failures=failures)
            failures += 1
        reach('future.executed')
        self._last[lane] = future.position, number
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)
        return answer

    async def stop(self, future: Future) -> bool:
        """Drop the operation where the model service has not begun it; its call then fails as cancelled."""
        number = self._numbers.get(future.future_id)
        if future.future_id in self._numbering:
            self._stopped.add(future.future_id)
        elif number is not None:
            await self._trainer.cancel(future.tenant_id, future.lane, number=number)
        return False

    async def _send(self, future: Future, payload: bytes, number: int) -> bytes | None:
        """Return the answer; None where it was certainly not run under this number."""
        trainer = self._trainer
        self._numbers[future.future_id] = number
        try:
            return await self._persistence.insist(lambda: trainer.execute(future.tenant_id, payload, number=number))
        except DomainError as error:
            if error.reason in _NOT_RUN:
                return None
            raise
        finally:
            self._numbers.pop(future.future_id, None)

    def _last_before(self, future: Future) -> int | None:
        """Return the last number, where it is of the position before: nobody ran anything of the lane since then."""
        position, number = self._last.pop((future.tenant_id, future.lane), (None, None))
        return number if position is not None and position + 1 == future.position else None

    async def _renumber(
        self, future: Future, *, last: int | None, instead_of: int | None, failures: int | None = None
    ) -> int:
        """Give a future that did not run a number, after a pause where others failed.

        Raises:
            Cancelled: it was stopped meanwhile.
        """
        self._numbering.add(future.future_id)
        try:
            if failures is not None:
                await self._persistence.hold(failures)
            number = await self._take_number(future, last=last, instead_of=instead_of)
            if future.future_id in self._stopped:
                raise Cancelled()
            return number
        finally:
            self._numbering.discard(future.future_id)
            self._stopped.discard(future.future_id)

    async def _take_number(self, future: Future, *, last: int | None, instead_of: int | None) -> int:
        trainer, store, insist = self._trainer, self._store, self._persistence.insist
        if last is None:
            last = await insist(lambda: trainer.last_number(future.tenant_id, future.lane))
        proposed = last + 1
        reach('future.numbering')
        number = await insist(lambda: store.number(future, proposed, instead_of=instead_of))
        reach('future.numbered')
        return number
