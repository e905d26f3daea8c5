"""Reports on this sampler's state, which gateways use to route requests."""

from collections.abc import Callable

from twinkle_services.sampler.application.admission import Admission
from twinkle_services.sampler.application.versions_protocol import Versions
from twinkle_services.sampler.domain.adapter import AdapterKey
from twinkle_services.sampler.domain.fleet import ReplicaReport
from twinkle_services.sampler.domain.generation import EngineFacts


class Replica:
    """Reports the engine, its load and its resident versions under one replica id."""

    def __init__(
        self,
        replica_id: str,
        facts: EngineFacts,
        admission: Admission,
        versions: Versions,
        *,
        followed_run: AdapterKey | None = None,
    ) -> None:
        self._replica_id = replica_id
        self._facts = facts
        self._admission = admission
        self._versions = versions
        self._followed_run = followed_run.name if followed_run else ''

    def report(self, address: str, *, is_draining: bool) -> ReplicaReport:
        """Return the current state of this sampler.

        Args:
            address: Address at which gateways reach this sampler, `host:port`.
            is_draining: Whether this sampler is leaving the fleet.
        """
        return ReplicaReport(
            replica_id=self._replica_id,
            address=address,
            base_model=self._facts.base_model,
            engine=self._facts.engine,
            load=self._admission.load,
            resident=tuple(self._versions.all_resident()),
            is_draining=is_draining,
            followed_run=self._followed_run,
        )

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the resident versions change."""
        self._versions.on_change(listener)

    async def wait_idle(self) -> None:
        """Wait until no request is being served.

        Waiting for free slots is not enough: a request has no slot while it fetches its adapter, or between two
        prompts of a batch.
        """
        await self._admission.requests.wait_empty()
        await self._admission.wait_idle()
