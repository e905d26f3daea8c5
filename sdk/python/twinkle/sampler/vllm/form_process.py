"""Compiles forms of outputs to find out whether they can be; runs as a program of its own, by its path.

xgrammar takes minutes and gigabytes for some forms of a few kilobytes, cannot be interrupted, and may crash. So this
process learns the vocabulary once, and each form is compiled in a fork of it that the kernel ends at a limit.

Reads a line of JSON for each form, `{"id", "kind", "text"}`, and writes `{"id", "problem"}`; the first line it writes
has the id 0 and says that it is ready. It ends with its input.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import xgrammar
from transformers import AutoTokenizer

_TOO_MUCH = 3
"""Exit status of a fork that ran out of memory."""
_IMPOSSIBLE = 4
"""Exit status of a fork whose form xgrammar refused."""
_PROBLEMS = {0: '', _IMPOSSIBLE: 'it cannot be compiled'}
_TOO_MUCH_PROBLEM = 'it takes too much time or memory to compile'


def main(folder: str, vocabulary_size: int, cpu_seconds: int, memory_bytes: int) -> None:
    """Answer until the input ends.

    Args:
        folder: of the model, whose tokenizer decides what a form costs.
        vocabulary_size: tokens that the model knows.
        cpu_seconds: limit of each form.
        memory_bytes: limit of each form, beyond what this process has.
    """
    answers = os.fdopen(os.dup(1), 'w')
    # Libraries may write what they like, but not between answers.
    os.dup2(2, 1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary_size)
    asked: dict[str, Any] = {'id': 0}
    problem = ''
    while True:
        answers.write(json.dumps({'id': asked['id'], 'problem': problem}) + '\n')
        answers.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        asked = json.loads(line)
        process_id = os.fork()
        if not process_id:
            _limit(cpu_seconds, memory_bytes)
            _compile(vocabulary, asked['kind'], asked['text'])
        _, status = os.waitpid(process_id, 0)
        problem = _PROBLEMS.get(os.waitstatus_to_exitcode(status), _TOO_MUCH_PROBLEM)


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    sizes = Path('/proc/self/statm')
    if sizes.exists():
        size_bytes = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + memory_bytes, size_bytes + memory_bytes))


def _compile(vocabulary: Any, kind: str, text: str) -> None:
    """Compile a form as vLLM does, and end this process with the outcome."""
    status = _IMPOSSIBLE
    try:
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        getattr(compiler, f'compile_{kind}')(text)
        status = 0
    except MemoryError:
        status = _TOO_MUCH
    finally:
        # Nothing of the process it was forked from may be ended twice.
        os._exit(status)


if __name__ == '__main__':
    main(sys.argv[1], *map(int, sys.argv[2:]))
