"""Errors of resolving hub ids to folders and of uploading folders to hubs. Messages explain how to fix the problem."""

from twinkle.errors import error_class


class HubError(Exception):
    """Base class of the hub errors."""


class ModelNotFound(HubError):
    """The model does not exist in any searched location."""


class DatasetNotFound(HubError):
    """The dataset, subset or split does not exist in any searched location."""


class PluginNotFound(HubError):
    """The plugin does not exist in any searched location."""


class HubUnreachable(HubError):
    """A hub or package index did not respond, or its client is not installed."""


class DigestMismatch(HubError):
    """A downloaded file does not have the expected digest."""


@error_class('{name} is now {new_name} on the hub and is not public; use the new name')
class RepositoryMoved(HubError):
    """A repository that is not public has another name now, under which the token may not be used."""

    name: str
    new_name: str


@error_class('{hub_id} has {size_bytes} bytes on the hub, and at most {limit_bytes} may be downloaded')
class DownloadTooLarge(HubError):
    """The files of a repository are larger than the limit; nothing was downloaded."""

    hub_id: str
    size_bytes: int
    limit_bytes: int


class UploadRefused(HubError):
    """A hub refuses an upload permanently; retrying does not help."""
