"""A program that checks whether structured output specifications (forms) can be compiled.

For some forms of a few kilobytes, xgrammar needs minutes and gigabytes, cannot be interrupted, and may crash. This
process therefore loads the vocabulary once and compiles each form in a fork with limits on CPU time and memory.

The program reads JSON lines `{"id", "kind", "text"}` and writes `{"id", "problem"}`. The first written line has the id
0 and signals that the program is ready. The program exits at the end of its input.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import xgrammar
from transformers import AutoTokenizer

_OUT_OF_MEMORY = 3
"""Exit status of a fork that ran out of memory."""
_REFUSED = 4
"""Exit status of a fork whose form xgrammar refused."""
_PROBLEMS = {0: '', _REFUSED: 'cannot be compiled; check its syntax'}
_LIMIT_PROBLEM = 'takes too much time or memory to compile; use a simpler format'


def main(folder: str, vocabulary_size: int, cpu_seconds: int, memory_bytes: int) -> None:
    """Process requests until the end of the input.

    Args:
        folder: folder of the model, whose tokenizer is used.
        vocabulary_size: number of tokens of the model.
        cpu_seconds: CPU time limit of each form.
        memory_bytes: memory limit of each form, in addition to the memory of this process.
    """
    responses = os.fdopen(os.dup(1), 'w')
    # Output of libraries must not mix with the responses.
    os.dup2(2, 1)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary_size)
    request: dict[str, Any] = {'id': 0}
    problem = ''
    while True:
        responses.write(json.dumps({'id': request['id'], 'problem': problem}) + '\n')
        responses.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line)
        process_id = os.fork()
        if not process_id:
            _limit(cpu_seconds, memory_bytes)
            _compile(vocabulary, request['kind'], request['text'])
        _, status = os.waitpid(process_id, 0)
        problem = _PROBLEMS.get(os.waitstatus_to_exitcode(status), _LIMIT_PROBLEM)


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
    sizes = Path('/proc/self/statm')
    if sizes.exists():
        size_bytes = int(sizes.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size_bytes + memory_bytes, size_bytes + memory_bytes))


def _compile(vocabulary: Any, kind: str, text: str) -> None:
    """Compile a form as vLLM does, and exit with the result as the status."""
    status = _REFUSED
    try:
        compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
        getattr(compiler, f'compile_{kind}')(text)
        status = 0
    except MemoryError:
        status = _OUT_OF_MEMORY
    finally:
        # Exit handlers of the parent process must not run in the fork.
        os._exit(status)


if __name__ == '__main__':
    main(sys.argv[1], *map(int, sys.argv[2:]))
