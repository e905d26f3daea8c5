"""How a moment is shown to people."""

from datetime import UTC

from google.protobuf.timestamp_pb2 import Timestamp


def local_text(moment: Timestamp) -> str:
    """Return a moment to the minute, in the zone of this machine; empty where it is not set."""
    if not moment.seconds:
        return ''
    return moment.ToDatetime(UTC).astimezone().strftime('%Y-%m-%d %H:%M')
