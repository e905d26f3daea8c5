"""Iterations of stateful preprocessors and filters over the rows of a dataset."""

from twinkle.infra import get_logger
from twinkle.preprocessor import DataFilter, FilterFunction, MapFunction, Preprocessor, report_of


def begin_pass(function: MapFunction | FilterFunction) -> None:
    """Reset the state that a preprocessor or filter keeps from earlier iterations."""
    if isinstance(function, Preprocessor | DataFilter):
        function.begin_pass()


def depends_on_earlier_rows(function: MapFunction) -> bool:
    """Return whether the result of a preprocessor for a row depends on earlier rows."""
    return isinstance(function, Preprocessor) and type(function).begin_pass is not Preprocessor.begin_pass


def is_stateful(function: MapFunction | FilterFunction) -> bool:
    """Return whether a preprocessor or filter keeps state between rows, for its result or its report."""
    for base in (Preprocessor, DataFilter):
        if isinstance(function, base):
            kind = type(function)
            return kind.begin_pass is not base.begin_pass or kind.end_pass is not base.end_pass
    return False


def log_report(function: MapFunction | FilterFunction) -> None:
    """Log the report of a preprocessor or filter on the completed iteration."""
    for line in report_of(function):
        get_logger().warning('%s', line)
