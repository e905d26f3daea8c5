"""Every verb of the service, put together from its ports."""

from dataclasses import dataclass

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.change_checkpoints import ChangeCheckpoints
from services.checkpoint.application.change_versions import DeleteVersion, PinVersion
from services.checkpoint.application.commit_state import CommitState
from services.checkpoint.application.exclusive import Exclusive
from services.checkpoint.application.fetch import Fetch
from services.checkpoint.application.publish import Publish
from services.checkpoint.application.read_checkpoints import DownloadCheckpoint, GetCheckpoint, ListCheckpoints
from services.checkpoint.application.read_versions import GetVersion, ListVersions
from services.checkpoint.application.subscribe import Subscribe
from services.checkpoint.application.upload_checkpoint import UploadCheckpoint
from services.checkpoint.application.watch_checkpoints import WatchCheckpoints
from services.checkpoint.domain import Catalogue
from services.checkpoint.ports import StateStore, UploadStore
from services.kit.clock import Clock
from services.kit.ids import new_id


@dataclass(frozen=True, kw_only=True)
class Verbs:
    """What the service can do."""

    publish: Publish
    subscribe: Subscribe
    fetch: Fetch
    get_version: GetVersion
    list_versions: ListVersions
    pin_version: PinVersion
    delete_version: DeleteVersion
    get_checkpoint: GetCheckpoint
    list_checkpoints: ListCheckpoints
    download_checkpoint: DownloadCheckpoint
    change_checkpoints: ChangeCheckpoints
    upload_checkpoint: UploadCheckpoint
    watch_checkpoints: WatchCheckpoints
    announcements: Announcements
    """What the streams that follow wait for; closed when the service ends."""


def make_verbs(
    catalogue: Catalogue, store: StateStore, uploads: UploadStore, *, clock: Clock, state_limit_bytes: int
) -> Verbs:
    """Return the verbs over one catalogue and its store.

    Args:
        catalogue: Holds what the store has.
        store: Keeps the states.
        uploads: Keeps archives until they are whole.
        clock: Tells what has expired.
        state_limit_bytes: Largest state or archive that is taken.
    """
    announcements, exclusive = Announcements(), Exclusive()
    commit = CommitState(catalogue, store, clock=clock, announcements=announcements, exclusive=exclusive)
    return Verbs(
        publish=Publish(commit, state_limit_bytes=state_limit_bytes),
        subscribe=Subscribe(catalogue, store, announcements),
        fetch=Fetch(catalogue, store, clock),
        get_version=GetVersion(catalogue),
        list_versions=ListVersions(catalogue),
        pin_version=PinVersion(catalogue, store, exclusive),
        delete_version=DeleteVersion(catalogue, store, exclusive),
        get_checkpoint=GetCheckpoint(catalogue, clock),
        list_checkpoints=ListCheckpoints(catalogue, clock),
        download_checkpoint=DownloadCheckpoint(catalogue, store, clock),
        change_checkpoints=ChangeCheckpoints(
            catalogue, store, clock=clock, announcements=announcements, exclusive=exclusive
        ),
        upload_checkpoint=UploadCheckpoint(commit, uploads, state_limit_bytes=state_limit_bytes),
        watch_checkpoints=WatchCheckpoints(catalogue, announcements, epoch=new_id('ep')),
        announcements=announcements,
    )
