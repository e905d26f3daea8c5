"""This sampler as the fleet is to see it."""

from services.sampler.application.get_load import GetLoad
from services.sampler.application.versions import Versions
from services.sampler.domain.adapter import AdapterKey
from services.sampler.domain.fleet import ReplicaReport
from services.sampler.domain.generation import EngineFacts


class Report:
    """Puts together what a gateway routes by."""

    def __init__(
        self, facts: EngineFacts, get_load: GetLoad, versions: Versions, followed_run: AdapterKey | None = None
    ) -> None:
        """Report what these say, and to which run the sampler belongs, if to one."""
        self._followed_run = followed_run.name if followed_run else ''
        self._facts = facts
        self._get_load = get_load
        self._versions = versions

    def __call__(self, replica_id: str, address: str, *, is_draining: bool) -> ReplicaReport:
        """Return how this sampler stands now.

        Args:
            replica_id: its name in the fleet.
            address: where gateways reach it.
            is_draining: whether it is about to leave.
        """
        return ReplicaReport(
            replica_id=replica_id,
            address=address,
            base_model=self._facts.base_model,
            engine=self._facts.engine,
            load=self._get_load.now(),
            resident=tuple(self._versions.all_resident()),
            is_draining=is_draining,
            followed_run=self._followed_run,
        )
