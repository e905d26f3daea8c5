"""Sandbox walls: restrictions on system calls, files and resources that a process sets for itself and cannot remove.

Linux 5.13 or later on x86-64 supports all walls for any user, without a container, with seccomp filters and
Landlock. Other systems support some of the walls; `enclose` returns the active walls.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

# Constants of prctl(2) and landlock(7); 444 to 446 are the numbers of Landlock's system calls.
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _RULE_PATH_BENEATH = 1, 1
_READ_FILE_AND_FOLDER = 1 << 2 | 1 << 3
_ALL_FILE_RIGHTS = (1 << 13) - 1
"""All rights of Landlock's first version: execute, read, write, list, remove and create."""
_TRUNCATE, _KNOWS_TRUNCATE = 1 << 14, 3
"""The right to truncate files, and the first version of Landlock that has it."""
_ALLOWED_CALLS = (
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 23, 24, 25, 28, 32, 33, 35, 37, 38, 39, 60),
    *(63, 79, 80, 89, 96, 97, 98, 99, 100, 102, 104, 107, 108, 110, 131, 158, 186, 201, 202, 204, 217, 218, 228, 229),
    *(230, 231, 262, 267, 269, 270, 271, 273, 318, 332, 334, 439),
)
"""Numbers of the allowed system calls on x86-64: the calls that an interpreter needs to read files, compute and write
to open files. Calls that start processes or threads, open connections, signal or inspect other processes, change a
file's name, owner or mode, or raise limits are not included."""
_ALLOWED_COMMANDS = {72: (0, 1, 2, 3, 4, 1030), 16: (0x5401, 0x5413, 0x5450, 0x5451)}
"""Allowed commands of `fcntl` (flags and copies of descriptors, but not signals on I/O) and of `ioctl` (terminal
queries and the close-on-exec flag), by system call number."""
_OPENING_CALLS = {2: 24, 257: 32}
"""Numbers of `open` and `openat`, with the offset of their flags in the filter's input."""
_CHANGING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Flags that modify files. `O_TRUNC` truncates a file even if it is opened for reading."""


def enclose(readable: list[str], *, memory_bytes: int, cpu_seconds: int) -> list[str]:
    """Set up all supported walls and return the active walls: 'memory', 'processes', 'network' and 'files'.

    Args:
        readable: folders and files that may be read, in addition to Python's.
        memory_bytes: limit of the address space.
        cpu_seconds: CPU time after which the kernel terminates the process; 0: no limit.
    """
    walls = _set_limits(memory_bytes, cpu_seconds)
    libc = ctypes.CDLL(None, use_errno=True)
    is_known = sys.platform == 'linux' and platform.machine() == 'x86_64'
    if not is_known or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return walls
    has_file_walls = _restrict_files(libc, readable)
    if not _restrict_calls(libc):
        return walls
    # Landlock is not sufficient for the files wall: without the filter, modes and owners could be changed.
    return ['memory', 'processes', 'network', *(['files'] if has_file_walls else [])]


def _set_limits(memory_bytes: int, cpu_seconds: int) -> list[str]:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if cpu_seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    # The kernel does not limit the number of processes of the superuser.
    walls = ['processes'] if os.getuid() else []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    except (OSError, ValueError):
        return walls
    return ['memory', *walls]


def _restrict_files(libc: ctypes.CDLL, readable: list[str]) -> bool:
    """Allow only reading, and only of some paths; return whether this succeeded."""
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    if version < 1:
        return False
    attributes = struct.pack('=Q', _ALL_FILE_RIGHTS | (_TRUNCATE if version >= _KNOWS_TRUNCATE else 0))
    ruleset = libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    python = [sys.prefix, sys.base_prefix, '/usr/lib', '/lib', '/lib64', '/usr/share/zoneinfo', '/etc/ld.so.cache']
    for path in [*python, '/dev/null', '/dev/urandom', *readable]:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        rights = _READ_FILE_AND_FOLDER if os.path.isdir(path) else 1 << 2  # noqa: PTH112  pathlib takes time to load
        libc.syscall(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack('=Qi', rights, descriptor), 0)
        os.close(descriptor)
    is_restricted = ruleset >= 0 and libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return is_restricted


def _restrict_calls(libc: ctypes.CDLL) -> bool:
    """Refuse all system calls that are not allowed, with EPERM; return whether this succeeded."""
    program = _filter()
    code = ctypes.create_string_buffer(b''.join(struct.pack('=HBBI', *step) for step in program))
    header = struct.pack('@HP', len(program), ctypes.addressof(code))
    return libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0


def _filter() -> list[tuple[int, int, int, int]]:
    """Return the filter's instructions: code, number of steps to skip if true and if false, and operand."""
    load, equal, has_bits, return_action = 0x20, 0x15, 0x45, 0x06
    kill, refuse, allow = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
    tests = [(equal, number) for number in _ALLOWED_CALLS]
    # Calls with conditions jump to a separate block, which loads one argument: for commands, the second.
    blocks = {
        **{call: [(load, 24), *((equal, known) for known in few)] for call, few in _ALLOWED_COMMANDS.items()},
        **{call: [(load, offset), (has_bits, _CHANGING_FLAGS)] for call, offset in _OPENING_CALLS.items()},
    }
    inner = [step for block in blocks.values() for step in (*block, (return_action, refuse))]
    body = [*tests, (return_action, refuse), *inner, (return_action, allow)]
    steps: list[tuple[int, int, int, int]] = []
    for index, (code, number) in enumerate(body):
        # Jump to the last step, which allows the call, if equal or if all of the bits are unset.
        to_end = len(body) - 2 - index
        steps.append((code, to_end if code == equal else 0, to_end if code == has_bits else 0, number))
    begin = len(tests) + 1
    entries: list[tuple[int, int, int, int]] = []
    for position, (call, block) in enumerate(blocks.items()):
        entries.append((equal, len(blocks) - position - 1 + begin, 0, call))
        begin += len(block) + 1
    return [(load, 0, 0, 4), (equal, 1, 0, 0xC000003E), (return_action, 0, 0, kill), (load, 0, 0, 0), *entries, *steps]
