"""What tokens stand for, remembered: a vocabulary never changes, and is asked for token by token as it is met."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from services.gateway.openai.samplers import Samplers
from services.kit.caller import Caller
from services.kit.rpc.tensors import tensor_to_proto
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire

MAX_VOCABULARIES = 16
"""Base models whose tokens are remembered."""
_MAX_ASKED = 1 << 16


@dataclass(frozen=True)
class TokenName:
    """What one token stands for."""

    piece: bytes
    is_special: bool
    """Left out of texts."""

    @property
    def text(self) -> str:
        """Its text; parts of characters become U+FFFD."""
        return self.piece.decode(errors='replace')


class TokenNames:
    """Asks samplers, each token once."""

    def __init__(self, samplers: Samplers) -> None:
        """Ask `samplers`."""
        self._samplers = samplers
        self._known: OrderedDict[str, dict[int, TokenName]] = OrderedDict()

    async def of(self, caller: Caller, base_model: str, token_ids: Iterable[int]) -> dict[int, TokenName]:
        """Return a mapping that has at least these tokens; not to be changed.

        Raises:
            DomainError: no sampler could tell.
        """
        known = self._known.setdefault(base_model, {})
        self._known.move_to_end(base_model)
        if len(self._known) > MAX_VOCABULARIES:
            self._known.popitem(last=False)
        missing = sorted(set(token_ids) - known.keys())
        for begin in range(0, len(missing), _MAX_ASKED):
            asked = missing[begin : begin + _MAX_ASKED]
            tensor = tensor_to_proto(np.asarray(asked, dtype=np.int32))
            request = wire.DescribeTokensRequest(base_model=base_model, token_ids=tensor)
            response = await self._samplers.describe_tokens(caller, request)
            names = (TokenName(form.piece, form.is_special) for form in response.tokens)
            known.update(zip(asked, names, strict=True))
        return known
