"""Names of Megatron trainers, which have no backend yet.

Programs can import the names; creating a trainer raises an error that names the alternative.
"""

from typing import Any, NoReturn

from twinkle.infra import NotSupportedYet


class MegatronModel:
    """Trainer on Megatron-core, which this release does not support."""

    def __new__(cls, *_args: Any, **_options: Any) -> NoReturn:
        """Raise before anything is loaded.

        Raises:
            NotSupportedYet: always; the message names the trainer to use instead.
        """
        alternative = cls.__name__.replace('Megatron', 'Transformers')
        raise NotSupportedYet(
            f'{cls.__name__} needs the Megatron backend, which is not supported yet; use {alternative} with the same '
            f'arguments and a mesh of dp_size and fsdp_size'
        )


class MultiLoraMegatronModel(MegatronModel):
    """Trainer on Megatron-core for several tenants, which this release does not support."""
