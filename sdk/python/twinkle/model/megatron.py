"""The names under which Megatron's trainers will be; there is no backend for them yet.

Programs that only import them run; making one says what to use instead.
"""

from typing import Any, NoReturn

from twinkle.infra import NotSupportedYet


class MegatronModel:
    """A trainer on Megatron-core, which this release does not have."""

    def __new__(cls, *_args: Any, **_options: Any) -> NoReturn:
        """Refuse, before anything is loaded.

        Raises:
            NotSupportedYet: always; the sentence names the trainer to use instead.
        """
        instead = cls.__name__.replace('Megatron', 'Transformers')
        raise NotSupportedYet(
            f'{cls.__name__} needs the Megatron backend, which is not supported yet; use {instead} with the same '
            f'arguments, without device_mesh, to train on one device'
        )


class MultiLoraMegatronModel(MegatronModel):
    """The same for several tenants, which this release does not have either."""
