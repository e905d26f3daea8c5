"""Runs one program behind walls: `run_program.py <walls> <folder> <memory bytes> <CPU seconds> <missing walls> <fd>`.

It says on the descriptor which walls stand, and then runs `program.py` of the folder, or nothing where walls are
missing that it was not told to do without.
"""

import json
import os
import runpy
import sys

WALLS = ('memory', 'processes', 'network', 'files')


def main() -> None:
    """Put up the walls and run the program."""
    walls_path, folder, memory_bytes, cpu_seconds, without, report = sys.argv[1:]
    enclose = runpy.run_path(walls_path)['enclose']
    standing = enclose([folder], memory_bytes=int(memory_bytes), cpu_seconds=int(cpu_seconds))
    os.write(int(report), json.dumps(standing).encode())
    os.close(int(report))
    if set(WALLS) - set(standing) - set(without.split(',')):
        sys.exit(1)
    sys.argv[:] = ['program.py']
    runpy.run_path('program.py', run_name='__main__')


if __name__ == '__main__':
    main()
