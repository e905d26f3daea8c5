"""Errors about a state, its transfer, or a folder that contains one."""

from twinkle.errors import error_class


class StateError(ValueError):
    """Base class of the errors about states and their transfer."""


@error_class('manifest.{field}: {problem}')
class InvalidManifest(StateError):
    """A manifest is inconsistent."""

    field: str
    """Path of the invalid field within the manifest, such as `tensors[3].offset`."""
    problem: str
    """Description of the problem and its fix."""


@error_class('the chunk at byte {offset} does not match its checksum; send it again')
class ChunkCorrupt(StateError):
    """A chunk's bytes do not match its checksum."""

    offset: int
    """First byte of the chunk within the state."""


@error_class('received a chunk at byte {offset}; the next chunk must begin at byte {expected}')
class ChunkOutOfOrder(StateError):
    """A chunk overlaps the received bytes or leaves a gap after them."""

    offset: int
    """First byte of the chunk within the state."""
    expected: int
    """Byte at which the next chunk must begin."""


@error_class('a chunk covers bytes {offset} to {end}, but the state has {size_bytes} bytes')
class ChunkOutOfRange(StateError):
    """A chunk reaches beyond the end of the state."""

    offset: int
    """First byte of the chunk within the state."""
    end: int
    """Position after the last byte of the chunk."""
    size_bytes: int
    """Size of the complete state."""


@error_class('only {next_offset} of {size_bytes} bytes have been received; send the rest first')
class StateIncomplete(StateError):
    """A state was requested before all of its bytes were received."""

    next_offset: int
    """Number of bytes received so far."""
    size_bytes: int
    """Size of the complete state."""


@error_class('the state has digest {actual}, expected {expected}')
class DigestMismatch(StateError):
    """All bytes were received, but their digest differs from the manifest's."""

    expected: str
    """Digest in the manifest, hexadecimal."""
    actual: str
    """Digest of the received bytes, hexadecimal."""


@error_class('{file_name}: {problem}')
class InvalidPeftFolder(StateError):
    """The files are not a LoRA adapter as PEFT saves it in safetensors files."""

    file_name: str
    """Invalid file, without its folder."""
    problem: str


@error_class('{file_name}: {problem}')
class InvalidModelFolder(StateError):
    """The files are not a model in safetensors format that an adapter can be merged into."""

    file_name: str
    """Invalid file, without its folder."""
    problem: str


@error_class('{problem}')
class AdapterMismatch(StateError):
    """An adapter, or a set of full weights, does not fit the base model."""

    problem: str
    """Description of the mismatch."""


@error_class('another process is merging into {folder}; wait for it or choose another folder')
class MergeRunning(StateError):
    """Another process is merging into the same folder."""

    folder: str


@error_class('the delta at byte {offset} {problem}')
class InvalidDelta(StateError):
    """The bytes are not a delta between the two states."""

    offset: int
    """Approximate byte in the delta at which the problem was found."""
    problem: str


@error_class('{name} has values beyond the range of {dtype}')
class WeightsOutOfRange(StateError):
    """Weights are too large for the element type that they should be rounded to."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Target element type."""


@error_class('the weight transport {name!r} cannot be used: {problem}')
class TransportUnavailable(StateError):
    """A transport is unknown, or this machine lacks its library or device."""

    name: str
    """Name of the transport."""
    problem: str
    """Description of the problem and its fix."""


@error_class('the transfer failed: {problem}')
class TransferFailed(StateError):
    """A transport could not move the bytes of a state; another way to send them may work."""

    problem: str
    """Description of the failure."""
