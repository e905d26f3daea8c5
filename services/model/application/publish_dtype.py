"""The element type of a published version: the trainer's own, or a narrower one and a warning."""

import asyncio
from dataclasses import replace

from services.kit.errors import InvalidField
from services.model.ports import AdapterState
from twinkle.checkpoint_engine.errors import WeightsOutOfRange
from twinkle.checkpoint_engine.rounding import round_tensors


async def as_published(state: AdapterState, dtype: str | None) -> tuple[AdapterState, tuple[str, ...]]:
    """Return the state as it is published, and what the caller is to be warned of.

    Args:
        state: As trained.
        dtype: Element type of the published weights. None: as trained.

    Raises:
        InvalidField: a weight is beyond that type's range.
    """
    if dtype is None:
        return state, ()
    try:
        rounded = await asyncio.to_thread(round_tensors, state.adapter, dtype)
    except WeightsOutOfRange as error:
        raise InvalidField('publish_version.dtype', str(error)) from error
    warnings = tuple(f'weights of {source} were rounded to {dtype}' for source in sorted(rounded.narrowed))
    return replace(state, adapter=rounded.tensors), warnings
