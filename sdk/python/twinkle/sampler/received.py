"""Which adapters came from a trainer, and which weights a request means that names none."""


class ReceivedAdapters:
    """The names of adapters that a sampler received from a trainer, oldest first.

    A loop that syncs one policy need not name it; nobody gets the base model in its place without asking.
    """

    def __init__(self) -> None:
        """Begin with none: a request without a name means the base model."""
        self._names: dict[str, None] = {}

    def add(self, adapter_name: str) -> None:
        """Note an adapter; a newer version of one that is known changes nothing."""
        self._names[adapter_name] = None

    def clear(self) -> None:
        """Forget all."""
        self._names.clear()

    def chosen(self, adapter_name: str, *, use_base_model: bool) -> str:
        """Return the adapter that is meant; empty for the base model.

        Raises:
            ValueError: an adapter and the base model are asked for, or several were received and none is named.
        """
        if use_base_model and adapter_name:
            raise ValueError(f'use_base_model and adapter_name {adapter_name!r} cannot both be meant')
        if adapter_name or use_base_model or not self._names:
            return adapter_name
        if len(self._names) > 1:
            raise ValueError(f'the adapters {list(self._names)} were received; say which with adapter_name=')
        return next(iter(self._names))
