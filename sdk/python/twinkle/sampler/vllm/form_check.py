"""Whether the form of an output can be compiled, found out before vLLM is asked to.

vLLM parses a form on the event loop once for each sequence, and compiles it in the engine core with few threads and
without a limit: one costly form, and everybody else's wait. So a form is compiled first in a process that can be
ended, once for all its sequences, and what came out is remembered.
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
"""What compiling one form may take; usual ones take less than a tenth of a second."""
MEMORY_BYTES = 1 << 30
_PROGRAM = Path(__file__).with_name('form_process.py')
_FIELD = 'structured_output'
_START_SECONDS = 180.0
_ANSWER_SECONDS = 60.0
"""Far beyond the limit, which is one of CPU time: only a process that hangs takes so long."""
_KEPT = 4096
"""Outcomes that are remembered."""


class FormChecker:
    """Finds out whether forms can be compiled; one after the other, and the owners of forms take turns.

    Concurrency: for one event loop.
    """

    def __init__(self, folder: str, *, vocabulary_size: int) -> None:
        """Start nothing yet.

        Args:
            folder: of the model whose tokens are to have the forms.
            vocabulary_size: how many there are.
        """
        self._arguments = [folder, vocabulary_size, CPU_SECONDS, MEMORY_BYTES]
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        self._owners: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._asked = 0

    @property
    def compiled_count(self) -> int:
        """How many forms were compiled to find out; the others were known."""
        return self._asked

    async def check(self, form: StructuredOutput, *, owner: str = '') -> StructuredOutputsParams:
        """Return how vLLM is told of a form that can be compiled.

        Args:
            form: as the caller gave it.
            owner: whose it is; of one owner's forms at most one waits for the others'.

        Raises:
            InvalidSamplingParams: it cannot be compiled, or not within the limits.
            EngineFailed: it could not be found out.
        """
        if form.json_object:
            return _checked(json_object=True)
        kind, text = specification(form)
        key = hashlib.blake2b(f'{kind} {text}'.encode('utf-8', 'surrogatepass'), digest_size=32).digest()
        problem = self._problems.get(key)
        if problem is None:
            async with self._turn_of(owner):
                problem = self._problems.get(key)
                if problem is None:
                    problem = self._problems[key] = await self._ask(kind, text)
        self._problems.move_to_end(key)
        while len(self._problems) > _KEPT:
            self._problems.popitem(last=False)
        if problem:
            raise InvalidSamplingParams(_FIELD, problem)
        return _checked(**{_ARGUMENTS[kind]: text})

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        # With it the fork that compiles just now: the process leads a group of its own.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    @asynccontextmanager
    async def _turn_of(self, owner: str) -> AsyncIterator[None]:
        lock = self._owners.setdefault(owner, asyncio.Lock())
        async with lock, self._turn:
            yield

    async def _ask(self, kind: str, text: str) -> str:
        """Return what is wrong with a form; a caller that leaves does not let the next one in before the answer."""
        asking = asyncio.create_task(self._answer(kind, text))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.wait({asking})
            raise

    async def _answer(self, kind: str, text: str) -> str:
        self._asked += 1
        line = json.dumps({'id': self._asked, 'kind': kind, 'text': text}) + '\n'
        try:
            process = await self._started()
            async with asyncio.timeout(_ANSWER_SECONDS):
                await _tell(process, line)
                return await _problem_of(process, self._asked)
        except (OSError, EOFError, TimeoutError) as error:
            await self.close()
            raise EngineFailed('the form of the output could not be checked; try again') from error

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                # Its folder has modules whose names others have, too.
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
"""vLLM's names, by those of xgrammar's compiler."""


def specification(form: StructuredOutput) -> tuple[str, str]:
    """Return what xgrammar is to compile, and its kind in the words of its compiler.

    Raises:
        InvalidSamplingParams: xgrammar would hold less of the form than it promises, or is not to be given it.
    """
    try:
        if form.json_schema is not None:
            schema = dict(form.json_schema)
            check_json_nesting(schema)
            if has_xgrammar_unsupported_json_features(schema):
                raise ValueError('the JSON schema uses what is not supported')
            return 'json_schema', json.dumps(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidSamplingParams(_FIELD, str(error)) from error
    if form.regex is not None:
        if '\x00' in form.regex:
            raise InvalidSamplingParams(_FIELD, 'a regular expression has no NUL')
        return 'regex', form.regex
    if form.choices is not None:
        return 'grammar', choice_as_grammar(list(form.choices))
    grammar = form.grammar or ''
    if not grammar.strip():
        raise InvalidSamplingParams(_FIELD, 'the grammar is empty')
    return ('lark' if grammar_is_likely_lark(grammar) else 'grammar'), grammar


def _checked(**form: Any) -> StructuredOutputsParams:
    params = StructuredOutputsParams(**form)
    params._backend = BACKEND  # noqa: SLF001 - vLLM sets it where it checks forms itself
    return params


async def _tell(process: asyncio.subprocess.Process, line: str) -> None:
    if process.stdin is not None:
        process.stdin.write(line.encode())
        await process.stdin.drain()


async def _problem_of(process: asyncio.subprocess.Process, number: int) -> str:
    """Return the answer to a question; what libraries may have written is passed over."""
    while True:
        line = await process.stdout.readline() if process.stdout else b''
        if not line:
            raise EOFError('the process that compiles forms has ended')
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict) and answer.get('id') == number:
                return answer['problem']
