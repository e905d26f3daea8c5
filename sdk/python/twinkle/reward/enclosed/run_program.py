"""Runs a program in the sandbox: `run_program.py <owner> <walls.py> <folder> <memory> <seconds> <optional> <fd>`.

Allows reading of the folder, writes the active walls to the file descriptor `<fd>`, and runs `program.py` in the
working directory. The address space is limited to `<memory>` bytes, and the CPU time to `<seconds>`. `<optional>` lists
the walls that may be missing, separated by commas. If any other wall is missing, the process exits without running the
program. On Linux, the kernel kills the process when its parent, the process `<owner>`, ends.
"""

import ctypes
import json
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Constant of prctl(2)."""
WALLS = ('memory', 'processes', 'network', 'files')


def main() -> None:
    """Set up the walls and run the program."""
    owner, walls_path, folder, memory_bytes, cpu_seconds, without, report = sys.argv[1:]
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The owner may have ended before.
    if os.getppid() != int(owner):
        sys.exit(1)
    enclose = runpy.run_path(walls_path)['enclose']
    active = enclose([folder], memory_bytes=int(memory_bytes), cpu_seconds=int(cpu_seconds))
    os.write(int(report), json.dumps(active).encode())
    os.close(int(report))
    if set(WALLS) - set(active) - set(without.split(',')):
        sys.exit(1)
    sys.argv[:] = ['program.py']
    runpy.run_path('program.py', run_name='__main__')


if __name__ == '__main__':
    main()
