"""Adapters of the running forward pass.

The model's own code calls linear layers with the input tensor only, so the layers read their spans from an
`ActiveAdapters` object that they share.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from twinkle.nn.expert_routing import ExpertRouting
from twinkle.nn.layer_update import ExpertUpdate, LayerDropout, LayerUpdate
from twinkle.nn.spans import AdapterSpan


@dataclass(frozen=True)
class LayerSpan:
    """Rows `[begin_row, end_row)` that an update changes at one layer."""

    begin_row: int
    end_row: int
    update: LayerUpdate
    dropout: LayerDropout | None


@dataclass(frozen=True)
class Pass:
    """Adapters, number of rows and routing of one pass."""

    spans: Sequence[AdapterSpan] = ()
    row_count: int = 0
    """Number of rows, padding included."""
    routing: ExpertRouting | None = None
    """Recording and replay of the experts of the rows."""


@dataclass(frozen=True)
class ExpertSpan:
    """Rows `[begin_row, end_row)` whose experts an update changes."""

    begin_row: int
    end_row: int
    update: ExpertUpdate


class ActiveAdapters:
    """Holder of the running pass, shared by all layers of a model.

    Concurrency: each model runs one pass at a time.
    """

    def __init__(self) -> None:
        self._running: Pass | None = None

    @contextmanager
    def activate(self, running: Pass) -> Iterator[None]:
        """Set the running pass within the block.

        Raises:
            RuntimeError: another pass of the same model is already running.
        """
        if self._running is not None:
            raise RuntimeError('a forward pass of this model is running; call a model from one thread only')
        self._running = running
        try:
            yield
        finally:
            self._running = None

    def reactivate(self) -> AbstractContextManager[None]:
        """Return a context that activates the current pass again after it has finished."""
        return self.activate(self._running or Pass())

    @property
    def row_count(self) -> int:
        """Number of rows of the running pass, padding included."""
        return self._running.row_count if self._running else 0

    @property
    def routing(self) -> ExpertRouting | None:
        """Recording and replay of the experts of the running pass."""
        return self._running.routing if self._running else None

    def spans_at(self, path: str, *, layer: int) -> list[LayerSpan]:
        """Return the row ranges that adapters update at a layer, in order."""
        if self._running is None:
            return []
        found: list[LayerSpan] = []
        for span in self._running.spans:
            update = None if span.adapter is None else span.adapter.update_of(path)
            if update is not None:
                layer_dropout = None if span.dropout is None else LayerDropout(span.dropout, layer)
                found.append(LayerSpan(span.begin_row, span.end_row, update, layer_dropout))
        return found

    def expert_spans_at(self, path: str) -> list[ExpertSpan]:
        """Return the row ranges for which adapters update stacked expert weights, in order."""
        spans = self._running.spans if self._running else ()
        used = [(span, span.adapter.expert_update_of(path)) for span in spans if span.adapter is not None]
        return [ExpertSpan(span.begin_row, span.end_row, found) for span, found in used if found is not None]
