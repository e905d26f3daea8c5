"""The place of the vLLM sampler; it is not built yet and says so."""

from typing import Any

from twinkle.infra import NotSupportedYet


class vLLMSampler:  # noqa: N801 - the name users type
    """Samples with vLLM. Not supported yet: making one raises `NotSupportedYet`."""

    def __init__(self, model_id: str, *args: Any, **kwargs: Any) -> None:
        """Refuse.

        Raises:
            NotSupportedYet: always.
        """
        del args, kwargs
        raise NotSupportedYet(
            f'vLLM is not supported in process yet; TorchSampler({model_id!r}) takes the same calls, and '
            '`twinkle up` serves them over gRPC'
        )
