"""The rule that decides which traces are listed: traces with a call that is neither a query nor background traffic."""

import re

from twinkle.telemetry.span_file import SpanRecord

_BACKGROUND = (
    'Heartbeat',
    'GetServerInfo',
    'ParkAdapter',
    'Session',
    'LogMetrics',
    'FleetService/Lease',
    'FleetService/Register',
    'create_session',
    'get_server_info',
    'health_check',
    'console.',
)
"""Parts of the names of calls that maintain or check a connection, or carry another call."""
_QUERIES = ('list_', 'find_operation', 'retrieve_future', '/List', '/Get', '/Watch', '/Wait', '/Describe')
"""Parts of the names of queries, such as the queries of `twinkle runs` and of the console."""
_OMITTED = re.compile('|'.join(map(re.escape, (*_BACKGROUND, *_QUERIES))))


def is_listed(span: SpanRecord) -> bool:
    """Return whether a trace with this span is listed: it is a call, and neither a query nor in the background."""
    is_call = span.kind == 'server' or span.service == 'client'
    return is_call and not _OMITTED.search(span.name)
