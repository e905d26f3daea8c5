"""The verb that lists checkpoints."""

from services.gateway.catalogue.ports import CheckpointStore
from services.gateway.catalogue.rules import Checkpoint, CheckpointFilter
from services.gateway.paging import Cursor, Listing, Page, list_page
from services.kit.caller import Caller


class ListRunCheckpoints:
    """Lists the caller's checkpoints, newest first. A run that is not the caller's has none."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        """List what `checkpoints` keeps."""
        self._checkpoints = checkpoints

    async def __call__(self, caller: Caller, page: Page, wanted: CheckpointFilter) -> Listing[Checkpoint]:
        """Return one page of those that are `wanted`."""
        found = await self._checkpoints.list_newest(caller.tenant_id, page, wanted)
        return list_page(found, page, cursor_of=lambda item: Cursor(item.create_time, item.checkpoint_id))
