"""Forms (structured outputs) are checked by compiling them. Checks are bounded, fair between tenants and cached."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from fixtures.forms import COSTLY_FORMS, USUAL_FORM
from fixtures.sampler_engines import need_vllm
from twinkle.data_format import StructuredOutput
from twinkle.sampler.errors import InvalidSamplingParams

pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope='module', loop_scope='session')
async def checker(tiny_llama_dir: Path) -> AsyncIterator[Any]:
    """Checker that all tests of this module share; its process reads the vocabulary once."""
    need_vllm()
    from twinkle.sampler.vllm.form_check import FormChecker  # noqa: PLC0415 (slow import)

    checker = FormChecker(str(tiny_llama_dir), vocabulary_size=320)
    yield checker
    await checker.close()


async def is_refused(checker: Any, form: StructuredOutput, *, owner: str = '') -> bool:
    """Return whether a form is refused as invalid."""
    try:
        await checker.check(form, owner=owner)
    except InvalidSamplingParams as error:
        return error.field == 'structured_output'
    return False


@pytest.mark.slow
async def test_expensive_form_is_refused_and_the_result_is_cached(checker):
    """An expensive form is refused; for another owner, the cached result is used."""
    compiled_counts: list[int] = []
    for owner in ('one', 'other'):
        for form in COSTLY_FORMS:
            assert await is_refused(checker, form, owner=owner)
        assert not await is_refused(checker, USUAL_FORM, owner=owner)
        compiled_counts.append(checker.compiled_count)
    assert compiled_counts[0] == compiled_counts[1] >= len(COSTLY_FORMS) + 1


@pytest.mark.parametrize(
    'form',
    [
        StructuredOutput(regex='((('),
        StructuredOutput(regex='a\x00b'),
        StructuredOutput(grammar='not a grammar {{{'),
        StructuredOutput(grammar='  '),
        StructuredOutput(json_schema={'type': 'integer', 'multipleOf': 7}),
        StructuredOutput(regex='(' * 8000 + 'a' + ')*' * 8000),
    ],
)
async def test_invalid_forms_are_refused(checker, form):
    """A form that vLLM or xgrammar rejects is refused."""
    assert await is_refused(checker, form)


@pytest.mark.parametrize(
    'form',
    [
        StructuredOutput(json_object=True),
        StructuredOutput(choices=('yes', 'no "quoted"\n')),
        StructuredOutput(grammar='root ::= "a" root | "b"'),
        StructuredOutput(json_schema={}),
        StructuredOutput(regex=''.join(f'(a{index}|b)' for index in range(200))),
    ],
)
async def test_valid_forms_are_accepted(checker, form):
    """A valid form of each kind is accepted."""
    assert not await is_refused(checker, form)


async def test_owners_alternate_in_the_form_checker(checker):
    """An owner with many expensive forms delays another owner by at most one form."""
    finished: list[str] = []

    async def check(owner: str, form: StructuredOutput) -> None:
        with suppress(InvalidSamplingParams):
            await checker.check(form, owner=owner)
        finished.append(owner)

    costly = [StructuredOutput(choices=(f'{index}' + 'ab' * 15000, 'c')) for index in range(3)]
    many = [asyncio.create_task(check('many', form)) for form in costly]
    await asyncio.sleep(0)
    await check('one', StructuredOutput(regex='[a-z]{1,8}'))
    assert finished.index('one') <= 1
    await asyncio.gather(*many)


async def test_cancelled_check_does_not_affect_the_next_form(checker):
    """The result of a cancelled check is not returned for the next form."""
    cancelled = asyncio.create_task(checker.check(StructuredOutput(regex='[ab]{3}')))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait({cancelled})
    assert await is_refused(checker, StructuredOutput(regex='(((('))


def is_form_process(process):
    """Return whether a process checks forms; the process of an earlier test may be a zombie."""
    try:
        return 'form_process.py' in ' '.join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
async def test_killed_checker_process_is_replaced(checker):
    """A killed checker process is replaced for the next form."""
    await checker.check(USUAL_FORM)
    [process] = [child for child in psutil.Process().children(recursive=True) if is_form_process(child)]
    process.kill()
    await asyncio.to_thread(process.wait)
    with suppress(Exception):
        # The first check may fail on the broken pipe.
        await checker.check(StructuredOutput(regex='[ab]{4}'))
    assert await is_refused(checker, StructuredOutput(regex='((((('))


async def test_replayed_tokens_have_the_time_limit_of_their_steps() -> None:
    """A replay of many tokens may take as long as the same number of steps."""
    need_vllm()
    from twinkle.sampler.vllm.forms import FormBudget  # noqa: PLC0415 (slow import)

    replayed, stalled = FormBudget(), FormBudget()
    replayed.spend(0.5, 6000)
    stalled.spend(0.5)
    assert (replayed.is_exhausted, stalled.is_exhausted) == (False, True)
