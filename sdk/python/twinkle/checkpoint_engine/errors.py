"""What can be wrong with a state, a transfer of one, or a folder that holds one.

Each error keeps its facts as attributes and is rebuilt from them, so that it survives a pickle
on its way between processes.
"""


class StateError(ValueError):
    """Something about a state or its transfer is wrong; nothing of it was kept."""


class InvalidManifest(StateError):
    """A manifest does not add up.

    Attributes:
        field: Path of the offending field within the manifest, such as `tensors[3].offset`.
        problem: What is wrong and what would be right.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f'manifest.{self.field}: {self.problem}'


class ChunkCorrupt(StateError):
    """A chunk's bytes do not match its checksum; send it again.

    Attributes:
        offset: Where the chunk begins in the state, in bytes.
    """

    def __init__(self, offset: int) -> None:
        super().__init__(offset)
        self.offset = offset

    def __str__(self) -> str:
        return f'the chunk at byte {self.offset} does not match its checksum'


class ChunkOutOfOrder(StateError):
    """A chunk overlaps what is held or leaves a gap after it.

    Attributes:
        offset: Where the chunk begins, in bytes.
        expected: Where the next chunk has to begin.
    """

    def __init__(self, offset: int, expected: int) -> None:
        super().__init__(offset, expected)
        self.offset = offset
        self.expected = expected

    def __str__(self) -> str:
        return f'a chunk came at byte {self.offset}, the next one has to begin at {self.expected}'


class ChunkOutOfRange(StateError):
    """A chunk reaches beyond the end of the state.

    Attributes:
        offset: Where the chunk begins, in bytes.
        end: Where it ends.
        size_bytes: Bytes of the whole state.
    """

    def __init__(self, offset: int, end: int, size_bytes: int) -> None:
        super().__init__(offset, end, size_bytes)
        self.offset = offset
        self.end = end
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        return f'a chunk covers bytes {self.offset} to {self.end} of a state of {self.size_bytes}'


class StateIncomplete(StateError):
    """A state was asked for before all of its bytes had come.

    Attributes:
        next_offset: How many bytes have come.
        size_bytes: Bytes of the whole state.
    """

    def __init__(self, next_offset: int, size_bytes: int) -> None:
        super().__init__(next_offset, size_bytes)
        self.next_offset = next_offset
        self.size_bytes = size_bytes

    def __str__(self) -> str:
        return f'{self.next_offset} of {self.size_bytes} bytes have come'


class DigestMismatch(StateError):
    """All bytes came, but together they are not what the manifest promised.

    Attributes:
        expected: The manifest's digest, hexadecimal.
        actual: The digest of what came.
    """

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(expected, actual)
        self.expected = expected
        self.actual = actual

    def __str__(self) -> str:
        return f'the state has digest {self.actual}, {self.expected} was promised'


class InvalidPeftFolder(StateError):
    """Files are not a peft LoRA adapter in safetensors.

    Attributes:
        file_name: The file at fault, without its folder.
        problem: What is wrong with it.
    """

    def __init__(self, file_name: str, problem: str) -> None:
        super().__init__(file_name, problem)
        self.file_name = file_name
        self.problem = problem

    def __str__(self) -> str:
        return f'{self.file_name}: {self.problem}'


class InvalidModelFolder(StateError):
    """Files are not a model in safetensors that an adapter can be merged into.

    Attributes:
        file_name: The file at fault, without its folder.
        problem: What is wrong with it.
    """

    def __init__(self, file_name: str, problem: str) -> None:
        super().__init__(file_name, problem)
        self.file_name = file_name
        self.problem = problem

    def __str__(self) -> str:
        return f'{self.file_name}: {self.problem}'


class AdapterMismatch(StateError):
    """An adapter does not fit the model it is to be merged into.

    Attributes:
        problem: Which layer, and what is wrong with it.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem


class MergeRunning(StateError):
    """Another process merges into the same folder; wait for it.

    Attributes:
        folder: The folder that is to be made.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.folder = folder

    def __str__(self) -> str:
        return f'another process is merging into {self.folder}'


class InvalidDelta(StateError):
    """Bytes are no delta between the two states.

    Attributes:
        offset: About where in the delta it shows, in bytes.
        problem: What is wrong there.
    """

    def __init__(self, offset: int, problem: str) -> None:
        super().__init__(offset, problem)
        self.offset = offset
        self.problem = problem

    def __str__(self) -> str:
        return f'the delta at byte {self.offset} {self.problem}'


class WeightsOutOfRange(StateError):
    """Weights are too large for the element type they are to be rounded to.

    Attributes:
        name: The tensor.
        dtype: The element type.
    """

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__(name, dtype)
        self.name = name
        self.dtype = dtype

    def __str__(self) -> str:
        return f'{self.name} has numbers beyond the range of {self.dtype}'
