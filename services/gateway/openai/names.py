"""Model names and token texts: resolves names to weights, lists models, and caches vocabularies."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from services.gateway.catalogue.rules import Run, RunFilter
from services.gateway.catalogue.runs import Runs
from services.gateway.errors import RunNotFound
from services.gateway.openai.samplers import FleetSamplers
from services.gateway.paging import Page
from services.kit.caller import Caller
from services.kit.errors import BaseModelNotFound
from services.kit.rpc.tensors import tensor_to_proto
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2

CHECKPOINT_PREFIX = 'twinkle://'
MAX_NAME = 512
MAX_LISTED_RUNS = 1000
"""Most runs in a list of models, the newest first; older runs can still be used by name."""
MAX_VOCABULARIES = 16
"""Base models whose token texts are cached."""
_MAX_VERSION_DIGITS = 18
_PAGE_SIZE = 200
_MAX_TOKENS_PER_CALL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class ResolvedModel:
    """Weights that a model name refers to."""

    base_model: str
    adapter: sampling_pb2.AdapterRef | None = None
    """None samples the base model alone."""
    run: Run | None = None


class ModelResolver:
    """Finds and lists models for a caller: base models, runs, versions of runs, and checkpoints."""

    def __init__(self, samplers: FleetSamplers, *, runs: Runs, started_at: datetime) -> None:
        """Resolve names; `started_at` is the reported creation time of base models."""
        self._samplers = samplers
        self._runs = runs
        self._started_at = started_at

    async def find(self, caller: Caller, name: str) -> ResolvedModel:
        """Resolve a model name.

        Raises:
            BaseModelNotFound: No model of the caller has this name.
            Unavailable: No sampler is available.
        """
        base_models = self._samplers.base_model_names()
        if name in base_models:
            return ResolvedModel(base_model=name)
        for run_id, adapter in _candidates(name):
            try:
                run = await self._runs.get(caller, run_id)
            except RunNotFound:
                continue
            return ResolvedModel(base_model=run.base_model, adapter=adapter, run=run)
        raise BaseModelNotFound(name[:MAX_NAME], tuple(base_models))

    async def list_all(self, caller: Caller) -> list[dict[str, Any]]:
        """Return the base models, then the caller's runs, newest first."""
        created = int(self._started_at.timestamp())
        models = [
            _model(info.base_model, created=created, owned_by='twinkle', max_model_len=info.context_tokens)
            for info in await self._samplers.base_models()
        ]
        return models + [_run_model(run, run.run_id) for run in await self._listed_runs(caller)]

    async def show(self, caller: Caller, name: str) -> dict[str, Any]:
        """Return one model.

        Raises:
            BaseModelNotFound: No model of the caller has this name.
            Unavailable: No sampler is available.
        """
        model = await self.find(caller, name)
        if model.run is not None:
            return _run_model(model.run, name)
        infos = {info.base_model: info for info in await self._samplers.base_models()}
        created = int(self._started_at.timestamp())
        context_tokens = infos[name].context_tokens if name in infos else 0
        return _model(name, created=created, owned_by='twinkle', max_model_len=context_tokens)

    async def _listed_runs(self, caller: Caller) -> Sequence[Run]:
        runs: list[Run] = []
        page = Page(size=_PAGE_SIZE)
        while len(runs) < MAX_LISTED_RUNS:
            listing = await self._runs.list(caller, page, RunFilter())
            runs += listing.items
            if listing.next_cursor is None:
                break
            page = Page(size=_PAGE_SIZE, after=listing.next_cursor)
        return runs


def _run_model(run: Run, name: str) -> dict[str, Any]:
    facts = {'version': run.version, 'step_count': run.step_count, 'lora_rank': run.lora_rank}
    created = int(run.create_time.timestamp())
    model = _model(name, created=created, owned_by=run.tenant_id, root=run.base_model, parent=run.base_model)
    return {**model, 'twinkle': {'run_id': run.run_id, **facts, 'is_active': run.is_active}}


def _model(name: str, **facts: Any) -> dict[str, Any]:
    return {'id': name, 'object': 'model', **facts}


def _candidates(name: str) -> list[tuple[str, sampling_pb2.AdapterRef]]:
    """Return the runs and weights that a name may refer to."""
    # Databases cannot store NUL in texts.
    if len(name) > MAX_NAME or '\0' in name:
        return []
    if name.startswith(CHECKPOINT_PREFIX):
        run_id, _, rest = name.removeprefix(CHECKPOINT_PREFIX).partition('/')
        is_complete = rest.startswith('weights/') and len(rest) > len('weights/')
        return [(run_id, sampling_pb2.AdapterRef(checkpoint_path=name))] if run_id and is_complete else []
    candidates = [(name, sampling_pb2.AdapterRef(adapter_id=name))] if name else []
    run_id, mark, digits = name.rpartition('@')
    is_version = digits.isascii() and digits.isdigit() and len(digits) <= _MAX_VERSION_DIGITS
    if mark and run_id and is_version and int(digits) >= 1:
        candidates.append((run_id, sampling_pb2.AdapterRef(adapter_id=run_id, exact=int(digits))))
    return candidates


@dataclass(frozen=True)
class TokenText:
    """Text of one token."""

    piece: bytes
    is_special: bool
    """Whether texts omit the token."""

    @property
    def text(self) -> str:
        """Decoded text; incomplete characters become U+FFFD."""
        return self.piece.decode(errors='replace')


class TokenTexts:
    """Cache of token texts; each token of a base model is requested from the samplers once."""

    def __init__(self, samplers: FleetSamplers) -> None:
        self._samplers = samplers
        self._known: OrderedDict[str, dict[int, TokenText]] = OrderedDict()

    async def get(self, caller: Caller, base_model: str, token_ids: Iterable[int]) -> dict[int, TokenText]:
        """Return a mapping that has at least these tokens; callers must not change it.

        Raises:
            DomainError: No sampler could describe the tokens.
        """
        known = self._known.setdefault(base_model, {})
        self._known.move_to_end(base_model)
        if len(self._known) > MAX_VOCABULARIES:
            self._known.popitem(last=False)
        missing = sorted(set(token_ids) - known.keys())
        for begin in range(0, len(missing), _MAX_TOKENS_PER_CALL):
            batch = missing[begin : begin + _MAX_TOKENS_PER_CALL]
            tensor = tensor_to_proto(np.asarray(batch, dtype=np.int32))
            request = wire.DescribeTokensRequest(base_model=base_model, token_ids=tensor)
            response = await self._samplers.describe_tokens(caller, request)
            texts = (TokenText(form.piece, form.is_special) for form in response.tokens)
            known.update(zip(batch, texts, strict=True))
        return known
