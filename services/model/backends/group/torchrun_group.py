"""Runs the engine in several processes that torchrun started: the first one serves, and the others repeat its calls.

If a process ends, hangs, or computes a different result, all processes exit, as if they had been killed. No outcome of
the running operation is recorded, so the journal can restore the adapters when the service starts again.
"""

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch.distributed as dist
from blake3 import blake3

from twinkle.model.engine.snapshot import STATE_TENSOR
from twinkle.parallel import RankWatch, all_gather, broadcast, program_store
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.worker import SingleWorker
from twinkle_services.model.backends.group.exit_group import exit_group, exit_on_defect
from twinkle_services.model.backends.group.host import EngineHost
from twinkle_services.model.domain.engine import AdapterState, UnfinishedVerb, VerbRun

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')
_NO_LIMIT = timedelta(days=365)
"""Time limit for receiving the next call, which may come after days; `RankWatch` detects lost processes."""


@dataclass(frozen=True)
class _Call:
    """Call of a method of `EngineHost`.

    Calls are pickled. Their arguments are objects of this program, made from parsed and validated messages.
    """

    method: str
    args: Sequence[Any]
    options: Mapping[str, Any]


class _Ranks:
    """Connection of this process to the others. Every process creates one after `join_ranks`, for use in one thread."""

    def __init__(self, silence_seconds: float) -> None:
        # Until all processes have loaded the model, the time limit of `join_ranks` applies.
        all_gather('finished loading', None)
        self._group = dist.new_group(backend='gloo', timeout=_NO_LIMIT)
        self._watch = RankWatch(
            program_store(),
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            silence_seconds=silence_seconds,
            on_lost=exit_group,
        )
        self._watch.start()

    def share(self, call: _Call | None) -> _Call | None:
        """Send `call` from the first process to the others, and return it in every process; None stops the group.

        The other processes pass None. They wait until the first process calls this method.
        """
        return broadcast(call, group=self._group)

    def run(self, host: EngineHost, call: _Call) -> Any:
        """Run a call, as every process does, and check that its outcome is the same in all processes.

        Raises:
            DomainError: The host refused the call.
            CallsDiffer: The outcome or the adapter's state differs in another process.
            RuntimeError: Another process was lost.
        """
        result, refusal = None, None
        try:
            result = getattr(host, call.method)(*call.args, **call.options)
        except DomainError as error:
            refusal = error
        all_gather(f'{call.method}: {_outcome_text(result, refusal)}', None, group=self._group)
        if refusal is not None:
            raise refusal
        return result

    def close(self) -> None:
        self._watch.close()


class TorchrunGroup:
    """Implements `WorkerGroup` in the first process, which sends each call to the others."""

    def __init__(self, host: EngineHost, worker: SingleWorker, *, silence_seconds: float) -> None:
        """Create the group. Call this in the thread of `worker`, after `join_ranks`; other processes call `follow`.

        Args:
            host: Host of the engine, used only in the thread of `worker`.
            worker: Thread of the engine.
            silence_seconds: Time without a heartbeat after which a process counts as lost.
        """
        self._host = host
        self._worker = worker
        self._ranks = _Ranks(silence_seconds)

    async def call(
        self,
        method: Callable[Concatenate[EngineHost, _Arguments], _Result],
        *args: _Arguments.args,
        **options: _Arguments.kwargs,
    ) -> _Result:
        """Call a method of the host in every process; an error other than DomainError ends all processes."""
        return await self._worker.run(self._run, _Call(method.__name__, args, options))

    async def close(self) -> None:
        """Stop the other processes and the thread once all earlier calls are done."""
        await self._worker.run(self._stop)
        self._worker.close()

    def _run(self, call: _Call) -> Any:
        with exit_on_defect():
            self._ranks.share(call)
            return self._ranks.run(self._host, call)

    def _stop(self) -> None:
        with exit_on_defect():
            self._ranks.share(None)
            self._ranks.close()


def follow(host: EngineHost, *, silence_seconds: float) -> None:
    """Repeat the calls of the first process until it stops. Signals are ignored, so that running calls complete."""
    with exit_on_defect():
        ranks = _Ranks(silence_seconds)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        while (call := ranks.share(None)) is not None:
            with suppress(DomainError):
                ranks.run(host, call)
        ranks.close()


def _outcome_text(result: Any, refusal: DomainError | None) -> str:
    """Describe the outcome of a call, to compare the processes; the text includes the digest of a copied state."""
    if refusal is not None:
        return f'refused, {refusal.reason}'
    if isinstance(result, list):
        parts = cast('list[object]', result)
        return ', '.join(_outcome_text(part, part if isinstance(part, DomainError) else None) for part in parts)
    if isinstance(result, UnfinishedVerb):
        return f'unfinished, {result.remaining_token_count}'
    if isinstance(result, VerbRun):
        # Numbers that a different gradient or update would change.
        return f'done, {getattr(result.outcome, "loss", None)!r}, {getattr(result.outcome, "grad_norm", None)!r}'
    if not isinstance(result, AdapterState):
        return 'done'
    hasher = blake3()
    for name, tensor in sorted({**result.trainer, **result.adapter}.items()):
        # This tensor contains elapsed times, which differ between processes.
        if name != STATE_TENSOR:
            hasher.update(name.encode())
            hasher.update(tensor.data)
    return f'done, state {hasher.hexdigest()}'
