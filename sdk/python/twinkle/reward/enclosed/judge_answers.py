"""Compares mathematical answers: `judge_answers.py <walls.py> <memory bytes> <seconds per comparison>`.

Writes a line `{"walls": [...]}` with the active walls when it is ready. Then it reads JSON lines
`{"truth": ..., "answer": ...}` and responds to each with a line `true` or `false`. A comparison that exceeds the time
limit terminates the process through an unhandled signal, because a Python signal handler would not run before the end
of a long multiplication.
"""

import json
import runpy
import signal
import sys
from typing import Any, cast

_SECONDS_TO_LOAD = 120.0


def main() -> None:
    """Process requests until the end of standard input."""
    walls_path, memory_bytes, seconds = sys.argv[1:]
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_LOAD)
    import math_verify  # noqa: PLC0415  the time limit covers the import

    parse, verify = cast('Any', math_verify.parse), cast('Any', math_verify.verify)
    parse('$\\frac{1}{2}$', parsing_timeout=None)
    active = runpy.run_path(walls_path)['enclose']([], memory_bytes=int(memory_bytes), cpu_seconds=0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _respond({'walls': active})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        request = json.loads(line)
        # math-verify treats unreadable answers as wrong. Any error terminates the process, and the caller then counts
        # the answer as wrong.
        is_same = _is_same(parse, verify, request['truth'], request['answer'])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _respond(is_same)


def _is_same(parse: Any, verify: Any, truth: str, answer: str) -> bool:
    return bool(verify(parse(truth, parsing_timeout=None), parse(answer, parsing_timeout=None), timeout_seconds=None))


def _respond(value: object) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201  standard output is the interface


if __name__ == '__main__':
    main()
