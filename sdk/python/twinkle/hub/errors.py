"""What can go wrong when an id is turned into a folder, or a folder into a repository."""


class HubError(Exception):
    """A model or dataset could not be had; the sentence says what to do about it."""


class ModelNotFound(HubError):
    """No place that was asked holds this model."""


class DatasetNotFound(HubError):
    """No place that was asked holds this dataset."""


class PluginNotFound(HubError):
    """No place that was asked holds this plugin."""


class HubUnreachable(HubError):
    """A hub or package index did not answer, or its client is not installed."""


class DigestMismatch(HubError):
    """A download is not the file that was expected."""


class UploadRefused(HubError):
    """A hub does not take an upload, however often it is tried."""
