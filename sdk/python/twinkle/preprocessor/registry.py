"""Registry of preprocessors and filters by name."""

from collections.abc import Callable, Mapping
from typing import Any

from twinkle.preprocessor.alpaca import AlpacaProcessor
from twinkle.preprocessor.base import Columns, DataFilter, Preprocessor, Row
from twinkle.preprocessor.clevr import CLEVRProcessor
from twinkle.preprocessor.competition_math import CompetitionMathGRPOProcessor, CompetitionMathProcessor
from twinkle.preprocessor.construct import construct
from twinkle.preprocessor.countdown import CountdownProcessor
from twinkle.preprocessor.emoji_dpo import EmojiDPOProcessor
from twinkle.preprocessor.errors import InvalidArguments
from twinkle.preprocessor.gsm8k import GSM8KProcessor
from twinkle.preprocessor.length_filter import TextLengthFilter
from twinkle.preprocessor.olympiad_bench import OlympiadBenchProcessor
from twinkle.preprocessor.quality import QUALITY_FILTERS, MessageNormalizer, QualityPreprocessor
from twinkle.preprocessor.row_formats import FormatProcessor
from twinkle.preprocessor.self_cognition import SelfCognitionProcessor

MapFunction = Preprocessor | Callable[[Columns], Columns]
"""Argument of `Dataset.map`: a preprocessor or a function from columns to columns."""
FilterFunction = DataFilter | Callable[[Row], bool]
"""Argument of `Dataset.filter`: a filter or a function from a row to a boolean."""

_PREPROCESSORS: dict[str, type[Preprocessor]] = {
    kind.__name__: kind
    for kind in (
        AlpacaProcessor,
        CLEVRProcessor,
        CompetitionMathGRPOProcessor,
        CompetitionMathProcessor,
        CountdownProcessor,
        EmojiDPOProcessor,
        FormatProcessor,
        GSM8KProcessor,
        MessageNormalizer,
        OlympiadBenchProcessor,
        QualityPreprocessor,
        SelfCognitionProcessor,
    )
}
_FILTERS: dict[str, type[DataFilter]] = {'TextLengthFilter': TextLengthFilter, **QUALITY_FILTERS}
_PATH_ARGUMENTS = frozenset({'dropped_log_path'})
"""Constructor arguments that are paths on the machine that processes the rows."""


def preprocessor_names() -> tuple[str, ...]:
    """Return the registered names of preprocessors, sorted."""
    return tuple(sorted(_PREPROCESSORS))


def filter_names() -> tuple[str, ...]:
    """Return the registered names of filters, sorted."""
    return tuple(sorted(_FILTERS))


def refuse_paths(init_args: Mapping[str, Any]) -> None:
    """Refuse arguments that are paths; a service calls this before it builds an object for a remote client.

    Raises:
        InvalidArguments: an argument is a path.
    """
    paths = sorted(_PATH_ARGUMENTS.intersection(init_args))
    if paths:
        raise InvalidArguments(f'{paths[0]} is a path on the machine that processes the rows; omit it')


def build_preprocessor(
    preprocessor: 'str | type[Preprocessor] | MapFunction', init_args: Mapping[str, Any] | None = None
) -> MapFunction:
    """Return a preprocessor given by name, class, instance or function; an instance is reset with `begin_pass`.

    Args:
        preprocessor: a registered name, the id of an allowed plugin, a class, an instance, or a function of columns.
        init_args: arguments of the constructor; only for names and classes. Default: none.

    Raises:
        UnknownPreprocessor: the name is not registered.
        InvalidArguments: the constructor does not accept the arguments, `init_args` is not empty for an instance or a
            function, or `preprocessor` is not callable.
        PluginRefused: plugins are not allowed, or the plugin does not contain exactly one preprocessor.
        HubError: the plugin cannot be downloaded.
    """
    return construct(preprocessor, init_args, _PREPROCESSORS, 'preprocessor')


def build_filter(
    row_filter: 'str | type[DataFilter] | FilterFunction', init_args: Mapping[str, Any] | None = None
) -> FilterFunction:
    """Return a filter given by name, class, instance or function; an instance is reset with `begin_pass`.

    Args:
        row_filter: a registered name, the id of an allowed plugin, a class, an instance, or a function of a row.
        init_args: arguments of the constructor; only for names and classes. Default: none.

    Raises:
        UnknownPreprocessor: the name is not registered.
        InvalidArguments: the constructor does not accept the arguments, `init_args` is not empty for an instance or a
            function, or `row_filter` is not callable.
        PluginRefused: plugins are not allowed, or the plugin does not contain exactly one filter.
        HubError: the plugin cannot be downloaded.
    """
    return construct(row_filter, init_args, _FILTERS, 'filter')
