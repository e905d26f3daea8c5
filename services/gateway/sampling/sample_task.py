"""A request to sample that waits: what is asked, and the handle of the weights that will answer it."""

from dataclasses import dataclass

_LENGTH_BYTES = 2


@dataclass(frozen=True)
class SampleTask:
    """One prompt, to be completed."""

    handle_id: str
    """Empty: the request names its weights itself."""
    request: bytes
    """A SampleBatchRequest of one prompt; without weights where a handle has them."""

    def to_bytes(self) -> bytes:
        """Return it as a future keeps it."""
        name = self.handle_id.encode()
        return len(name).to_bytes(_LENGTH_BYTES, 'big') + name + self.request

    @classmethod
    def from_bytes(cls, data: bytes) -> 'SampleTask':
        """Return what `to_bytes` was made of."""
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], 'big')
        return cls(data[_LENGTH_BYTES:end].decode(), data[end:])
