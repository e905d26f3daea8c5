"""Remote handles over gRPC, with the names of the component library `twinkle`.

`init_twinkle_client` connects; `twinkle_client.{dataset,dataloader,model,sampler}` contain the building blocks of a
training loop. This package does not import torch.
"""

from twinkle_client.client import TwinkleClient, current_client, init_twinkle_client
from twinkle_client.errors import (
    AccessError,
    BusyError,
    CancelledError,
    ConflictError,
    DeadlineError,
    Error,
    FieldViolation,
    NotFoundError,
    NotSupportedError,
    QuotaError,
    RetryableError,
    ServerError,
    StateError,
    UsageError,
)
from twinkle_client.tinker_service import init_tinker_client, init_tinker_compat_client

__version__ = '0.1.0'

__all__ = [
    'AccessError',
    'BusyError',
    'CancelledError',
    'ConflictError',
    'DeadlineError',
    'Error',
    'FieldViolation',
    'NotFoundError',
    'NotSupportedError',
    'QuotaError',
    'RetryableError',
    'ServerError',
    'StateError',
    'TwinkleClient',
    'UsageError',
    '__version__',
    'current_client',
    'init_tinker_client',
    'init_tinker_compat_client',
    'init_twinkle_client',
]
