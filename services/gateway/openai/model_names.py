"""Names of models: a base model, a run, a version of a run, a checkpoint; and which weights each one means."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from services.gateway.catalogue.get_run import GetRun
from services.gateway.catalogue.list_runs import ListRuns
from services.gateway.catalogue.rules import Run, RunFilter
from services.gateway.errors import RunNotFound
from services.gateway.openai.samplers import Samplers
from services.gateway.paging import Page
from services.kit.caller import Caller
from services.kit.errors import BaseModelNotFound
from twinkle.api.sampler.v1 import sampling_pb2

CHECKPOINT_PREFIX = 'twinkle://'
MAX_NAME = 512
_MAX_VERSION_DIGITS = 18
_PAGE_SIZE = 200
MAX_LISTED_RUNS = 1000
"""Runs that a list of models shows, the newest ones; all others can be used just as well."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a name means."""

    base_model: str
    adapter: sampling_pb2.AdapterRef | None = None
    """None: the base model alone."""
    run: Run | None = None


class ModelNames:
    """Finds and lists models for a caller."""

    def __init__(self, samplers: Samplers, *, get_run: GetRun, list_runs: ListRuns, started_at: datetime) -> None:
        """Know base models from `samplers`, runs from the catalogue; base models are as old as the server."""
        self._samplers = samplers
        self._get_run = get_run
        self._list_runs = list_runs
        self._started_at = started_at

    async def find(self, caller: Caller, name: str) -> Weights:
        """Return what `name` means to the caller.

        Raises:
            BaseModelNotFound: nothing; another tenant's run is as one that does not exist.
            Unavailable: no sampler can tell.
        """
        base_models = self._samplers.base_model_names()
        if name in base_models:
            return Weights(base_model=name)
        for run_id, adapter in _readings(name):
            try:
                run = await self._get_run(caller, run_id)
            except RunNotFound:
                continue
            return Weights(base_model=run.base_model, adapter=adapter, run=run)
        raise BaseModelNotFound(name[:MAX_NAME], tuple(base_models))

    async def list_all(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the models that can be named: base models, then the caller's runs, newest first."""
        created = int(self._started_at.timestamp())
        models = [
            _model(info.base_model, created=created, owned_by='twinkle', max_model_len=info.context_tokens)
            for info in await self._samplers.base_models()
        ]
        return models + [show_run(run, run.run_id) for run in await self._runs(caller)]

    async def show(self, caller: Caller, name: str) -> dict[str, Any]:
        """Return one model.

        Raises:
            BaseModelNotFound, Unavailable: as `find`.
        """
        weights = await self.find(caller, name)
        if weights.run is not None:
            return show_run(weights.run, name)
        infos = {info.base_model: info for info in await self._samplers.base_models()}
        created = int(self._started_at.timestamp())
        context_tokens = infos[name].context_tokens if name in infos else 0
        return _model(name, created=created, owned_by='twinkle', max_model_len=context_tokens)

    async def _runs(self, caller: Caller) -> Sequence[Run]:
        runs: list[Run] = []
        page = Page(size=_PAGE_SIZE)
        while len(runs) < MAX_LISTED_RUNS:
            listing = await self._list_runs(caller, page, RunFilter())
            runs += listing.items
            if listing.next_cursor is None:
                break
            page = Page(size=_PAGE_SIZE, after=listing.next_cursor)
        return runs


def show_run(run: Run, name: str) -> dict[str, Any]:
    """Return a run as a model called `name`."""
    facts = {'version': run.version, 'step_count': run.step_count, 'lora_rank': run.lora_rank}
    created = int(run.create_time.timestamp())
    model = _model(name, created=created, owned_by=run.tenant_id, root=run.base_model, parent=run.base_model)
    return {**model, 'twinkle': {'run_id': run.run_id, **facts, 'is_active': run.is_active}}


def _model(name: str, **facts: Any) -> dict[str, Any]:
    return {'id': name, 'object': 'model', **facts}


def _readings(name: str) -> list[tuple[str, sampling_pb2.AdapterRef]]:
    """Return the runs that a name may mean, and which of their weights."""
    # No database has texts with that character in them.
    if len(name) > MAX_NAME or '\0' in name:
        return []
    if name.startswith(CHECKPOINT_PREFIX):
        run_id, _, rest = name.removeprefix(CHECKPOINT_PREFIX).partition('/')
        is_whole = rest.startswith('weights/') and len(rest) > len('weights/')
        return [(run_id, sampling_pb2.AdapterRef(checkpoint_path=name))] if run_id and is_whole else []
    readings = [(name, sampling_pb2.AdapterRef(adapter_id=name))] if name else []
    run_id, mark, digits = name.rpartition('@')
    is_version = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_VERSION_DIGITS
    if mark and run_id and is_version and int(digits) >= 1:
        readings.append((run_id, sampling_pb2.AdapterRef(adapter_id=run_id, exact=int(digits))))
    return readings
