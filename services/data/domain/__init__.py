"""Values and rules of the data service: datasets, their sources and steps, loaders and cursors."""

from twinkle_services.data.domain.dataset import TOKEN_COLUMNS, Dataset, Row, Table
from twinkle_services.data.domain.errors import (
    DatasetNotFound,
    DatasetNotReady,
    HubIdNotFound,
    LoaderNotFound,
    PositionNotReached,
)
from twinkle_services.data.domain.loader import MAX_CREDITS, Cursor, Loader
from twinkle_services.data.domain.row_limits import DecodedBytes, DecodedLimits, RowMeter
from twinkle_services.data.domain.source import (
    MAX_INTERLEAVED,
    HubSource,
    HubStream,
    MixtureSource,
    RowSource,
    Source,
    StreamMixture,
    StreamPart,
    UploadSource,
)
from twinkle_services.data.domain.step import CheckStep, EncodeStep, FilterStep, MapStep, PackStep, Step, TemplateStep

__all__ = [
    'MAX_CREDITS',
    'MAX_INTERLEAVED',
    'TOKEN_COLUMNS',
    'CheckStep',
    'Cursor',
    'Dataset',
    'DatasetNotFound',
    'DatasetNotReady',
    'DecodedBytes',
    'DecodedLimits',
    'EncodeStep',
    'FilterStep',
    'HubIdNotFound',
    'HubSource',
    'HubStream',
    'Loader',
    'LoaderNotFound',
    'MapStep',
    'MixtureSource',
    'PackStep',
    'PositionNotReached',
    'Row',
    'RowMeter',
    'RowSource',
    'Source',
    'Step',
    'StreamMixture',
    'StreamPart',
    'Table',
    'TemplateStep',
    'UploadSource',
]
