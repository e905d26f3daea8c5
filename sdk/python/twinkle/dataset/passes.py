"""Passes of preprocessors and filters over rows: some remember what they saw, and tell what they left out."""

from twinkle.infra import get_logger
from twinkle.preprocessor import DataFilter, FilterFunction, MapFunction, Preprocessor, report_of


def begin_pass(function: MapFunction | FilterFunction) -> None:
    """Make a preprocessor or filter forget the rows of earlier passes."""
    if isinstance(function, Preprocessor | DataFilter):
        function.begin_pass()


def remembers_rows(function: MapFunction) -> bool:
    """Return whether what a preprocessor makes of a row depends on rows before it."""
    return isinstance(function, Preprocessor) and type(function).begin_pass is not Preprocessor.begin_pass


def log_report(function: MapFunction | FilterFunction) -> None:
    """Log what a preprocessor or filter tells of the pass that is over."""
    for line in report_of(function):
        get_logger().warning('%s', line)
