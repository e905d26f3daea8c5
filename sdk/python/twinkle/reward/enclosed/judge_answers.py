"""Tells whether two mathematical answers are the same: `judge_answers.py <walls> <memory bytes> <seconds>`.

Reads lines of JSON `{"truth": ..., "answer": ...}` and answers each with a line, `true` or `false`, after a first line
`{"walls": [...]}` that says it is ready and which walls stand. An answer that takes longer than the time ends the
process, by a signal that nobody handles: a handler of Python's would wait until the one huge multiplication is done.
"""

import json
import runpy
import signal
import sys
from typing import Any, cast

_SECONDS_TO_LOAD = 120.0


def main() -> None:
    """Answer until there are no more questions."""
    walls_path, memory_bytes, seconds = sys.argv[1:]
    signal.setitimer(signal.ITIMER_REAL, _SECONDS_TO_LOAD)
    import math_verify  # noqa: PLC0415  its loading is bounded too

    parse, verify = cast('Any', math_verify.parse), cast('Any', math_verify.verify)
    parse('$\\frac{1}{2}$', parsing_timeout=None)
    standing = runpy.run_path(walls_path)['enclose']([], memory_bytes=int(memory_bytes), cpu_seconds=0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _answer({'walls': standing})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, float(seconds))
        question = json.loads(line)
        # math-verify takes what it cannot read for wrong; anything else ends the process, which means the same.
        is_same = _is_same(parse, verify, question['truth'], question['answer'])
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer(is_same)


def _is_same(parse: Any, verify: Any, truth: str, answer: str) -> bool:
    return bool(verify(parse(truth, parsing_timeout=None), parse(answer, parsing_timeout=None), timeout_seconds=None))


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201  its one way to speak


if __name__ == '__main__':
    main()
