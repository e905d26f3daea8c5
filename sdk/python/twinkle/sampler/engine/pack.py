"""Packing of the rows of many sequences into one batch: grouped by adapter, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinkle.nn import AdapterSpan, KVCache, MediaSpan, SequenceSpan
from twinkle.processor import join_positions
from twinkle.sampler.engine.request import EngineAdapter, EngineRequest, Experts
from twinkle.sampler.engine.scheduler import StepPlan


@dataclass(frozen=True, kw_only=True)
class PackItem:
    """Rows of one sequence: the next tokens that are not in its cache yet."""

    token_ids: Sequence[int]
    cache: KVCache
    request: EngineRequest
    """Request of the sequence."""
    experts: list[Experts]
    """List to which the experts of the rows are appended, if requested."""
    is_by_row: bool = False
    """Whether to compute attention row by row, so that keys and values are bitwise equal to sampling."""


@dataclass(frozen=True, kw_only=True)
class Pack:
    """The arguments of `PackedCausalLM.hidden`; T is the number of rows."""

    input_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T], or [3, T] if a prompt has positions on three axes."""
    sequences: list[SequenceSpan]
    adapters: list[AdapterSpan]
    media: list[MediaSpan]
    item_rows: list[range]
    """Rows of each item, in input order."""


def items_of(plan: StepPlan) -> list[PackItem]:
    """Return the rows of each decode, replay and prompt chunk of a step, and count the replayed tokens as computed."""
    items = [
        PackItem(
            token_ids=sequence.tokens[-1:],
            cache=sequence.cache,
            request=sequence.group.request,
            experts=sequence.experts,
        )
        for sequence in plan.decodes
    ]
    for chunk in plan.replays:
        sequence = chunk.sequence
        begin = len(sequence.tokens) - sequence.uncomputed_count
        token_ids = sequence.tokens[begin : begin + chunk.row_count]
        sequence.uncomputed_count -= chunk.row_count
        request, experts = sequence.group.request, sequence.experts
        items.append(
            PackItem(token_ids=token_ids, cache=sequence.cache, request=request, experts=experts, is_by_row=True)
        )
    for chunk in plan.prefills:
        group = chunk.group
        token_ids = group.request.prompt_token_ids[chunk.begin : chunk.end]
        items.append(PackItem(token_ids=token_ids, cache=group.cache, request=group.request, experts=group.experts))
    return items


def pack(items: Sequence[PackItem], *, device: str | torch.device) -> Pack:
    """Arrange `items` so that the rows of each adapter version are contiguous."""
    order = sorted(range(len(items)), key=lambda position: _adapter_key(items[position].request.adapter))
    token_ids: list[int] = []
    positions: list[npt.NDArray[np.int64]] = []
    media: list[MediaSpan] = []
    sequences: list[SequenceSpan] = []
    item_rows = [range(0)] * len(items)
    for position in order:
        item = items[position]
        rows = range(len(token_ids), len(token_ids) + len(item.token_ids))
        token_ids.extend(item.token_ids)
        begin, end = item.cache.length, item.cache.length + len(rows)
        if item.request.media is None:
            positions.append(np.arange(begin, end))
        else:
            positions.append(item.request.media.positions(begin, end))
            media += item.request.media.spans_between(begin, end, first_row=rows.start)
        step = 1 if item.is_by_row else max(len(rows), 1)
        sequences += [SequenceSpan(row, min(row + step, rows.stop), item.cache) for row in rows[::step]]
        item_rows[position] = rows
    return Pack(
        input_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        position_ids=torch.as_tensor(join_positions(positions), dtype=torch.int64, device=device),
        sequences=sequences,
        adapters=adapter_spans([(items[position].request.adapter, item_rows[position]) for position in order]),
        media=media,
        item_rows=item_rows,
    )


def _adapter_key(adapter: EngineAdapter | None) -> tuple[str, int]:
    return (adapter.key, adapter.version) if adapter else ('', 0)


def adapter_spans(rows: list[tuple[EngineAdapter | None, range]]) -> list[AdapterSpan]:
    """Join adjacent rows of one adapter version into one span."""
    spans: list[AdapterSpan] = []
    last_key: tuple[str, int] | None = None
    for adapter, item_rows in rows:
        key = _adapter_key(adapter)
        begin_row = item_rows.start
        if key == last_key:
            begin_row = spans.pop().begin_row
        spans.append(AdapterSpan(begin_row, item_rows.stop, adapter.weights if adapter else None))
        last_key = key
    return spans
