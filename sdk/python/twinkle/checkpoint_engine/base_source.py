"""The identity of the base weights of a trainer or sampler."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BaseSource:
    """The origin of base weights. Base weights with equal sources are bitwise equal."""

    model_folder: str
    """Folder that the weights were loaded from, as an absolute path without symbolic links."""
    dtype: str
    """Data type of the weights in memory, by torch's name."""
    digest: str = ''
    """blake3 of the state that has replaced the weights. Empty: the weights are unchanged since loading."""
