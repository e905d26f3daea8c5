"""Configuration of the data service."""

import re
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from twinkle_services.kit.config import BaseModelId, ServiceConfig

_REPOSITORY = re.compile(r'\*|[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')


def _repository(name: str) -> str:
    if not _REPOSITORY.fullmatch(name):
        raise ValueError(f'must be org/name, org or *, without a prefix such as hf://, got {name!r}')
    return name


class DataConfig(ServiceConfig):
    """Settings of the data service."""

    service: ClassVar[str] = 'data'
    callers: ClassVar[tuple[str, ...]] = ('gateway', 'model')

    base_models: tuple[BaseModelId, ...] = ()
    """Base models of the deployment, with the same names as in the model service. A request may name a model by the
    path of a folder only if the path is listed here. Their tokenizers are read with the token of the service."""
    local_roots: tuple[Path, ...] = ()
    """Folders whose files callers may read as datasets by path. Empty: callers can only upload files or use hub ids."""
    hub_token_repositories: tuple[Annotated[str, AfterValidator(_repository)], ...] = ()
    """Datasets, and models with tokenizers, that the service reads with its token (`HF_TOKEN`, `MODELSCOPE_API_TOKEN`,
    or the login of its user) and from the caches of the hubs' clients: `org/name` for one, `org` for all of an owner,
    `*` for all. Every tenant can read the private repositories that this allows. Empty: the token is used only for
    `base_models` and aliases, so other repositories must be public or in the mirror."""
    thread_count: int = Field(default=2, ge=1)
    """Number of threads that read, tokenize and write rows."""
    template_cache: int = Field(default=4, ge=1)
    """Maximum number of templates in memory, each with a tokenizer."""
    row_limit: int = Field(default=2_000_000, ge=1)
    """Maximum number of rows of a dataset."""
    dataset_bytes: int = Field(default=512 << 20, ge=1)
    """Maximum size of a dataset's rows in memory, in bytes."""
    decoded_bytes_per_tenant: int = Field(default=1 << 30, ge=1)
    """Maximum memory of the rows that a tenant's requests prepare, in bytes. While a step changes rows, both the old
    and the new rows count. A process that reads a streamed dataset has at most the same memory."""
    decoded_bytes: int = Field(default=4 << 30, ge=1)
    """Maximum memory of the rows that all requests prepare, in bytes."""
    stream_limit: int = Field(default=8, ge=1)
    """Maximum number of streamed datasets that are read at the same time, each by a process; a tenant has at most half
    of them. Each dataset of an interleaved mixture counts. Streams that no call reads are closed after ten minutes, or
    when others need their place."""
    stored_bytes: int = Field(default=32 << 30, ge=1)
    """Maximum size of a tenant's stored datasets and their exported files, in bytes. A dataset with more bytes on a hub
    is not downloaded."""
    upload_limit_bytes: int = Field(default=4 << 30, ge=1)
    """Maximum size of an uploaded file, in bytes."""
    upload_bytes: int = Field(default=16 << 30, ge=1)
    """Maximum size of all uploads of a tenant, in bytes."""
    dataset_limit: int = Field(default=1000, ge=1)
    """Maximum number of datasets of a tenant."""
    loader_limit: int = Field(default=256, ge=1)
    """Maximum number of open loaders of a tenant."""
    upload_hours: float = Field(default=24.0, gt=0)
    """Time in hours for which an upload is stored after its last stream."""
    sweep_seconds: float = Field(default=600.0, gt=0)
    """Time in seconds between two searches for expired uploads."""
