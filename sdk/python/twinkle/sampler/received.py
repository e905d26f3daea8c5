"""The default adapter of a sampler that received adapters from a trainer."""


class ReceivedAdapters:
    """Names of the adapters that a sampler received from a trainer, oldest first.

    A training loop that sends a single adapter can omit the name when it samples. Once an adapter has been received, a
    call must set `use_base_model` to sample from the base model.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, adapter_name: str) -> None:
        """Record an adapter. Recording another version of the same adapter has no effect."""
        self._names[adapter_name] = None

    def clear(self) -> None:
        """Remove all names."""
        self._names.clear()

    def chosen(self, adapter_name: str, *, use_base_model: bool) -> str:
        """Return the adapter that a call uses; empty for the base model.

        Raises:
            ValueError: both an adapter and the base model are requested, or several adapters were received and
                `adapter_name` is empty.
        """
        if use_base_model and adapter_name:
            raise ValueError(f'use_base_model and adapter_name {adapter_name!r} cannot be combined; pass one of them')
        if adapter_name or use_base_model or not self._names:
            return adapter_name
        if len(self._names) > 1:
            raise ValueError(f'several adapters were received: {list(self._names)}; select one with adapter_name=')
        return next(iter(self._names))
