"""What the data service can be told."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.kit.config import ServiceConfig


class DataConfig(ServiceConfig):
    """Configuration of the data service."""

    service: ClassVar[str] = 'data'
    callers: ClassVar[tuple[str, ...]] = ('gateway', 'model')

    base_models: tuple[str, ...] = ()
    """Base models of this deployment, as the model service is told; only these may be folders."""
    local_roots: tuple[Path, ...] = ()
    """Folders from which a dataset may be read by its path. Empty: callers upload or name a hub id."""
    thread_count: int = Field(default=2, ge=1)
    """Threads that read, tokenise and write."""
    template_cache: int = Field(default=4, ge=1)
    """Templates, each with a tokenizer, that are kept ready."""
    row_limit: int = Field(default=2_000_000, ge=1)
    """Most rows of one dataset."""
    upload_limit_bytes: int = Field(default=4 << 30, ge=1)
    """Largest file that may be uploaded."""
    dataset_limit: int = Field(default=1000, ge=1)
    """Most datasets of one tenant."""
    loader_limit: int = Field(default=256, ge=1)
    """Most open loaders of one tenant."""
    upload_hours: float = Field(default=24.0, gt=0)
    """How long an upload that does not grow is kept."""
    sweep_seconds: float = Field(default=600.0, gt=0)
    """Time between two looks for uploads that have expired."""
