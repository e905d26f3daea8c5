"""Checks chunks with the library's verifier and tells what is wrong in the service's words."""

from collections.abc import Iterator
from contextlib import contextmanager

from services.kit.errors import ChunkCorrupt, DigestMismatch, InvalidField, StreamOutOfOrder
from twinkle import checkpoint_engine as engine


@contextmanager
def domain_errors() -> Iterator[None]:
    """Raise the domain's error for each of the library's."""
    try:
        yield
    except engine.ChunkCorrupt as error:
        raise ChunkCorrupt(error.offset) from error
    except engine.ChunkOutOfOrder as error:
        raise StreamOutOfOrder.at_byte(error.expected) from error
    except engine.ChunkOutOfRange as error:
        problem = f'ends at byte {error.end} of a state of {error.size_bytes}'
        raise InvalidField('frame.chunk', problem) from error
    except engine.StateIncomplete as error:
        raise StreamOutOfOrder.at_byte(error.next_offset) from error
    except engine.DigestMismatch as error:
        raise DigestMismatch(error.expected, error.actual) from error
