"""Every verb of the service, put together from its ports."""

from dataclasses import dataclass

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.change_checkpoints import ChangeCheckpoints
from services.checkpoint.application.change_versions import DeleteVersion, PinVersion
from services.checkpoint.application.collect_versions import CollectVersions
from services.checkpoint.application.commit_state import CommitState
from services.checkpoint.application.copy_checkpoint import CopyCheckpoint
from services.checkpoint.application.exclusive import Exclusive
from services.checkpoint.application.fetch import Fetch
from services.checkpoint.application.noted_store import NotedStore
from services.checkpoint.application.publish import Publish
from services.checkpoint.application.read_checkpoints import DownloadCheckpoint, GetCheckpoint, ListCheckpoints
from services.checkpoint.application.read_versions import GetVersion, ListVersions
from services.checkpoint.application.subscribe import Subscribe
from services.checkpoint.application.upload_checkpoint import Intake, UploadCheckpoint
from services.checkpoint.application.watch_checkpoints import WatchCheckpoints
from services.checkpoint.domain import Catalogue
from services.checkpoint.ports import StateStore
from services.kit.clock import Clock
from services.kit.ids import new_id
from services.kit.weights import Sender


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
    copy_checkpoint: CopyCheckpoint
    watch_checkpoints: WatchCheckpoints
    collect_versions: CollectVersions
    announcements: Announcements
    """What the streams that follow wait for; closed when the service ends."""


def make_verbs(catalogue: Catalogue, store: StateStore, intake: Intake, *, sender: Sender, clock: Clock) -> Verbs:
    """Return the verbs over one catalogue and its store.

    Args:
        catalogue: Holds what the store has.
        store: Keeps the states.
        intake: What is taken of others.
        sender: Sends states.
        clock: Tells what has expired.
    """
    announcements, exclusive = Announcements(), Exclusive()
    store = NotedStore(store, clock)
    commit = CommitState(catalogue, store, clock=clock, announcements=announcements, exclusive=exclusive)
    return Verbs(
        publish=Publish(commit, state_limit_bytes=intake.state_limit_bytes),
        subscribe=Subscribe(catalogue, store, announcements, sender=sender),
        fetch=Fetch(catalogue, store, clock, sender=sender),
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
        upload_checkpoint=UploadCheckpoint(commit, intake),
        copy_checkpoint=CopyCheckpoint(commit, catalogue, store, clock),
        watch_checkpoints=WatchCheckpoints(catalogue, announcements, epoch=new_id('ep')),
        collect_versions=CollectVersions(
            catalogue, store, clock=clock, announcements=announcements, exclusive=exclusive
        ),
        announcements=announcements,
    )
