"""Where the base weights of a trainer or sampler come from, to tell whether two have the same."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BaseSource:
    """Two that are equal are the same weights to the bit."""

    model_folder: str
    """Folder they were loaded from, as an absolute path without links."""
    dtype: str
    """Of the weights as they are held, by torch's name."""
    digest: str = ''
    """blake3 of the state that replaced them since; empty: they are as they were loaded."""
