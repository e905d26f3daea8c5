"""Quotas and usage: what tenants may use, and what they used.

`book` knows the quotas; `rates` and `training` and `sampling` hold tenants to them before anything changes; `meter`
counts what was done, and `futures` what was done for futures.
"""

from services.gateway.application.quotas.book import QuotaBook
from services.gateway.application.quotas.futures import QuotaRoom, SampleTally
from services.gateway.application.quotas.get_quota import GetQuota
from services.gateway.application.quotas.get_usage import GetTenantUsage, GetUsage
from services.gateway.application.quotas.meter import UsageMeter
from services.gateway.application.quotas.new_adapters import NewAdapters
from services.gateway.application.quotas.rates import TokenRates
from services.gateway.application.quotas.requests import QuotaRequests
from services.gateway.application.quotas.sampling import SamplingGate, limited_sampling
from services.gateway.application.quotas.set_quota import SetQuota
from services.gateway.application.quotas.training import LimitedTrainer, TrainingGate

__all__ = [
    'GetQuota',
    'GetTenantUsage',
    'GetUsage',
    'LimitedTrainer',
    'NewAdapters',
    'QuotaBook',
    'QuotaRequests',
    'QuotaRoom',
    'SampleTally',
    'SamplingGate',
    'SetQuota',
    'TokenRates',
    'TrainingGate',
    'UsageMeter',
    'limited_sampling',
]
