"""Bring an adapter to a sampler before it is needed."""

from dataclasses import replace

from services.gateway.fleet.members import Membership
from services.gateway.sampling.routed_call import RoutedCall
from services.gateway.sampling.rules import RoutedOrder
from services.kit.caller import Caller
from services.kit.errors import DomainError


class LoadAdapter:
    """Loads where requests for the adapter would go first. The request does not say of which base model it is."""

    def __init__(self, call: RoutedCall, membership: Membership) -> None:
        """Use `call`, once for each base model in `membership` until one takes the adapter."""
        self._call = call
        self._membership = membership

    async def __call__(self, caller: Caller, order: RoutedOrder, *, deadline: float | None = None) -> bytes:
        """Return the answer.

        Raises:
            ScopeMissing: the caller may not sample.
            NoReplica: nobody is there.
            DomainError: as the sampler says.
        """
        serving = self._membership.fleet.serving('sampler')
        *others, last = sorted({name for item in serving for name in item.report.base_models}) or ['']
        for base_model in others:
            try:
                return await self._call(caller, _for(order, base_model), deadline=deadline)
            except DomainError as error:
                # Of another base model, which the sampler can tell and the gateway cannot.
                if error.reason != 'INVALID_FIELD':
                    raise
        return await self._call(caller, _for(order, last), deadline=deadline)


def _for(order: RoutedOrder, base_model: str) -> RoutedOrder:
    return replace(order, key=replace(order.key, base_model=base_model))
