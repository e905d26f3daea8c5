"""Checks whether a structured output specification (a *form*) can be compiled, before it is passed to vLLM.

vLLM parses a form on the event loop for each sequence. It compiles the form in the engine core, with few threads and
without limits, so one costly form would delay all others. A form is therefore compiled first in a separate process with
limits, once for all sequences that use it, and the result is cached.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from twinkle.data_format import StructuredOutput
from twinkle.sampler.errors import EngineFailed, InvalidSamplingParams
from twinkle.sampler.vllm.forms import BACKEND

CPU_SECONDS = 2
"""CPU time limit for compiling one form. Typical forms take less than 0.1 s."""
MEMORY_BYTES = 1 << 30
"""Memory limit for compiling one form, in addition to the memory of the process."""
_PROGRAM = Path(__file__).with_name('form_process.py')
_FIELD = 'structured_output'
_UNSUPPORTED = (
    'the JSON schema has keywords that are not enforced, such as multipleOf, uniqueItems, contains, some values of '
    'format, or pattern with minLength or maxLength; remove them'
)
_START_SECONDS = 180.0
"""Time limit for the start of the process, which loads the vocabulary."""
_RESPONSE_SECONDS = 60.0
"""Time limit for a response, far above the CPU limit; only a hanging process exceeds it."""
_CACHED_RESULTS = 4096
"""Number of cached results."""


class FormChecker:
    """Checks forms one at a time; owners take turns. The process starts with the first check.

    Args:
        folder: folder of the model whose tokenizer is used.
        vocabulary_size: number of tokens of the model.

    Concurrency: one event loop.
    """

    def __init__(self, folder: str, *, vocabulary_size: int) -> None:
        self._arguments = [folder, vocabulary_size, CPU_SECONDS, MEMORY_BYTES]
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        self._owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._lock = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._request_count = 0

    @property
    def compiled_count(self) -> int:
        """Number of forms that the process was asked to compile; other results came from the cache."""
        return self._request_count

    async def check(self, form: StructuredOutput, *, owner: str = '') -> StructuredOutputsParams:
        """Check a form and return it in vLLM's format.

        Args:
            form: specification of the output.
            owner: owner of the request. Owners take turns: at most one form of each owner waits for the process.

        Raises:
            InvalidSamplingParams: the form is malformed, has features that are not supported, or cannot be compiled
                within the limits.
            EngineFailed: the process that compiles forms exited or did not respond.
        """
        if form.json_object:
            return _checked(json_object=True)
        kind, text = specification(form)
        key = hashlib.blake2b(f'{kind} {text}'.encode('utf-8', 'surrogatepass'), digest_size=32).digest()
        problem = self._problems.get(key)
        if problem is None:
            async with self._exclusive(owner):
                problem = self._problems.get(key)
                if problem is None:
                    problem = self._problems[key] = await self._request(kind, text)
        self._problems.move_to_end(key)
        while len(self._problems) > _CACHED_RESULTS:
            self._problems.popitem(last=False)
        if problem:
            raise InvalidSamplingParams(_FIELD, problem)
        return _checked(**{_ARGUMENTS[kind]: text})

    async def close(self) -> None:
        """Stop the process."""
        process, self._process = self._process, None
        if process is None:
            return
        # The process leads a process group, which includes the fork that is compiling.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    @asynccontextmanager
    async def _exclusive(self, owner: str) -> AsyncIterator[None]:
        lock = self._owners.setdefault(owner, asyncio.Lock())
        async with lock, self._lock:
            yield

    async def _request(self, kind: str, text: str) -> str:
        """Return the problem of a form, or ''. A cancelled call ends only after the process has responded."""
        task = asyncio.create_task(self._compile(kind, text))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            raise

    async def _compile(self, kind: str, text: str) -> str:
        self._request_count += 1
        line = json.dumps({'id': self._request_count, 'kind': kind, 'text': text}) + '\n'
        try:
            process = await self._started()
            async with asyncio.timeout(_RESPONSE_SECONDS):
                await _send(process, line)
                return await _problem_of(process, self._request_count)
        except (OSError, EOFError, TimeoutError) as error:
            await self.close()
            raise EngineFailed('structured_output could not be checked; retry the request') from error

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                # -P: modules in the program's folder must not shadow other modules.
                '-P',
                str(_PROGRAM),
                *map(str, self._arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            async with asyncio.timeout(_START_SECONDS):
                await _problem_of(self._process, 0)
        return self._process


_ARGUMENTS = {'json_schema': 'json', 'regex': 'regex', 'grammar': 'grammar', 'lark': 'grammar'}
"""vLLM's argument names, by the names of xgrammar's compiler."""


def specification(form: StructuredOutput) -> tuple[str, str]:
    """Return the kind of a form (the suffix of xgrammar's `compile_*` method) and the text to compile.

    Raises:
        InvalidSamplingParams: the form is malformed or uses features that xgrammar does not enforce.
    """
    try:
        if form.json_schema is not None:
            schema = dict(form.json_schema)
            check_json_nesting(schema)
            if has_xgrammar_unsupported_json_features(schema):
                raise ValueError(_UNSUPPORTED)
            return 'json_schema', json.dumps(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidSamplingParams(_FIELD, str(error)) from error
    if form.regex is not None:
        if '\x00' in form.regex:
            raise InvalidSamplingParams(_FIELD, 'the regular expression contains a NUL character; remove it')
        return 'regex', form.regex
    if form.choices is not None:
        return 'grammar', choice_as_grammar(list(form.choices))
    grammar = form.grammar or ''
    if not grammar.strip():
        raise InvalidSamplingParams(_FIELD, 'the grammar is empty; pass at least one rule')
    return ('lark' if grammar_is_likely_lark(grammar) else 'grammar'), grammar


def _checked(**form: Any) -> StructuredOutputsParams:
    params = StructuredOutputsParams(**form)
    params._backend = BACKEND  # noqa: SLF001 - vLLM sets it in its own check
    return params


async def _send(process: asyncio.subprocess.Process, line: str) -> None:
    if process.stdin is not None:
        process.stdin.write(line.encode())
        await process.stdin.drain()


async def _problem_of(process: asyncio.subprocess.Process, number: int) -> str:
    """Return the problem that the process reports for a request; skip other lines, such as output of libraries."""
    while True:
        line = await process.stdout.readline() if process.stdout else b''
        if not line:
            raise EOFError('the process that compiles structured output has exited')
        with suppress(ValueError):
            response = json.loads(line)
            if isinstance(response, dict) and response.get('id') == number:
                return response['problem']
