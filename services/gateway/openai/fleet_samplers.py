"""The fleet of samplers, as this API calls it: through the very verbs that serve it over RPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from services.gateway.errors import NoReplica
from services.gateway.fleet.members import Membership
from services.gateway.sampling.convert import describe_order_from_bytes, sample_order_from_bytes
from services.gateway.sampling.sampling_verbs import SamplingVerbs
from services.kit.caller import Caller
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.server.v1 import server_service_pb2

_SERVICE = 'sampler'


class FleetSamplers:
    """Implements `Samplers` with all of the fleet."""

    def __init__(
        self,
        verbs: SamplingVerbs,
        membership: Membership,
        *,
        describe: Callable[[], Awaitable[server_service_pb2.ServiceInfo]],
    ) -> None:
        """Sample with `verbs`.

        Args:
            verbs: find a replica, and go on elsewhere where it is lost.
            membership: who is there.
            describe: tells what the fleet says of itself.
        """
        self._verbs = verbs
        self._membership = membership
        self._describe = describe

    async def sample(self, caller: Caller, request: wire.SampleRequest) -> AsyncGenerator[wire.SampleResponse, None]:
        """Yield the answer; see the protocol."""
        order = sample_order_from_bytes(request.SerializeToString())
        async with aclosing(self._verbs.sample(caller, order)) as pieces:
            async for piece in pieces:
                yield wire.SampleResponse.FromString(piece.raw)

    async def describe_tokens(self, caller: Caller, request: wire.DescribeTokensRequest) -> wire.DescribeTokensResponse:
        """Return what tokens stand for; see the protocol."""
        order = describe_order_from_bytes(request.SerializeToString())
        return wire.DescribeTokensResponse.FromString(await self._verbs.routed_call(caller, order))

    def base_model_names(self) -> Sequence[str]:
        """Return the names of what can be sampled; see the protocol."""
        # Lost ones as well, as long as they are remembered: a request for what they serve waits for them a little.
        reports = [replica.report for replica in self._membership.fleet.replicas()]
        shared = [report for report in reports if report.service == _SERVICE and not report.followed_run]
        names = sorted({name for report in shared for name in report.base_models})
        if not names:
            raise NoReplica(_SERVICE)
        return names

    async def base_models(self) -> Sequence[server_service_pb2.BaseModelInfo]:
        """Return what can be sampled; see the protocol."""
        info = await self._describe()
        found = {model.base_model: model for model in info.base_models}
        return [found.get(name, server_service_pb2.BaseModelInfo(base_model=name)) for name in self.base_model_names()]
