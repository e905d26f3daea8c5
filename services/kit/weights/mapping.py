"""Maps files into memory without an open descriptor, so that the limit of descriptors does not limit the mappings.

`mmap.mmap` keeps a duplicate of the file's descriptor for as long as the mapping exists.
"""

import ctypes
import mmap
import os
import weakref
from functools import lru_cache

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A shared mapping of a file. The file stays mapped while this object or a view of its bytes exists."""

    def __init__(self, descriptor: int, size_bytes: int, *, is_writable: bool) -> None:
        """Map the first `size_bytes` bytes of an open file. The caller may close the descriptor afterwards.

        Raises:
            OSError: The file cannot be mapped.
        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE if is_writable else mmap.PROT_READ
        address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._is_writable = is_writable
        self.area = _area_class(size_bytes).from_address(address)
        """ctypes array over the mapped bytes; every view keeps the array alive."""
        unmap = weakref.finalize(self.area, _libc.munmap, address, size_bytes)
        # Other objects may still be in use when the interpreter exits; the system unmaps all memory then.
        unmap.atexit = False

    @property
    def data(self) -> memoryview:
        """The bytes, read-only unless the file was mapped for writing."""
        view = memoryview(self.area).cast('B')
        return view if self._is_writable else view.toreadonly()


@lru_cache(maxsize=64)
def _area_class(size_bytes: int) -> 'type[ctypes.Array[ctypes.c_ubyte]]':
    """Return a class of byte arrays whose instances, unlike those of `c_ubyte * n`, support weak references."""
    return type('Area', (ctypes.c_ubyte * size_bytes,), {})
