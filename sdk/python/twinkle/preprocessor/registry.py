"""Preprocessors and filters by name."""

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
from twinkle.preprocessor.self_cognition import SelfCognitionProcessor

MapFunction = Preprocessor | Callable[[Columns], Columns]
FilterFunction = DataFilter | Callable[[Row], bool]

_PREPROCESSORS: dict[str, type[Preprocessor]] = {
    kind.__name__: kind
    for kind in (
        AlpacaProcessor,
        CLEVRProcessor,
        CompetitionMathGRPOProcessor,
        CompetitionMathProcessor,
        CountdownProcessor,
        EmojiDPOProcessor,
        GSM8KProcessor,
        MessageNormalizer,
        OlympiadBenchProcessor,
        QualityPreprocessor,
        SelfCognitionProcessor,
    )
}
_FILTERS: dict[str, type[DataFilter]] = {'TextLengthFilter': TextLengthFilter, **QUALITY_FILTERS}
_PLACES = frozenset({'dropped_log_path'})
"""Arguments that name files of the machine where rows are worked on."""


def preprocessor_names() -> tuple[str, ...]:
    """Return the names `build_preprocessor` takes, sorted."""
    return tuple(sorted(_PREPROCESSORS))


def filter_names() -> tuple[str, ...]:
    """Return the names `build_filter` takes, sorted."""
    return tuple(sorted(_FILTERS))


def refuse_places(init_args: Mapping[str, Any]) -> None:
    """Refuse arguments that name files; a service calls this before it builds what a client asks for.

    Raises:
        InvalidArguments: there is one.
    """
    places = sorted(_PLACES.intersection(init_args))
    if places:
        raise InvalidArguments(f'{places[0]} names a file of the machine where rows are worked on; leave it out')


def build_preprocessor(
    preprocessor: 'str | type[Preprocessor] | MapFunction', init_args: Mapping[str, Any] | None = None
) -> MapFunction:
    """Return a preprocessor given by name, class, instance or as a function of columns; an instance begins a new pass.

    Args:
        init_args: of its constructor; for names and classes only.

    Raises:
        UnknownPreprocessor: the name is not registered.
        InvalidArguments: arguments the constructor does not take.
    """
    return construct(preprocessor, init_args, _PREPROCESSORS, 'preprocessor')


def build_filter(
    row_filter: 'str | type[DataFilter] | FilterFunction', init_args: Mapping[str, Any] | None = None
) -> FilterFunction:
    """Return a filter given by name, class, instance or as a function of a row; an instance begins a new pass.

    Raises:
        UnknownPreprocessor: the name is not registered.
        InvalidArguments: arguments the constructor does not take.
    """
    return construct(row_filter, init_args, _FILTERS, 'filter')
