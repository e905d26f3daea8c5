"""Tests that other threads continue while a JSON body is parsed and converted."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from fixtures.tiers import mostly_slow
from twinkle_services.gateway.http.body import parse_object
from twinkle_services.gateway.tinker.arrays import ElementBudget, array_from_json
from twinkle_services.kit.errors import InvalidField

MIB = 1 << 20
SIZE = 32 * MIB
"""Size of the bodies. Parsing such a body in a single step would hold the interpreter's lock for one to five
seconds."""


def tensor(item: str) -> bytes:
    """Return a body with a tensor of one repeated element."""
    items = ','.join([item] * (SIZE // (len(item) + 1)))
    return f'{{"dtype":"{"int64" if item.isdigit() else "float32"}","data":[{items}]}}'.encode()


def convert(body: bytes) -> None:
    """Parse and convert a body with a tensor."""
    array_from_json(parse_object(body), 'data', ElementBudget())


def longest_pause_beside(work: Callable[[], Any]) -> float:
    """Run `work` in another thread, and return the longest pause of this thread as a fraction of the whole time."""
    thread = threading.Thread(target=work)
    begin = last = time.perf_counter()
    thread.start()
    longest = 0.0
    while thread.is_alive():
        thread.join(0.002)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (last - begin)


@pytest.mark.parametrize('item', mostly_slow(['7', '123456', '0.5']))
def test_other_threads_run_while_a_long_body_is_parsed_and_converted(item: str) -> None:
    """No pause of another thread takes a quarter of the time in which the numbers of a body are parsed."""
    body = tensor(item)
    assert longest_pause_beside(lambda: convert(body)) < 0.25


@pytest.mark.parametrize('item', ['[]', '{}', '""'])
def test_bodies_with_too_many_lists_objects_or_texts_are_refused(item: str) -> None:
    """A body with too many elements that cannot be parsed in short steps is refused before parsing."""
    body = f'{{"a":[{",".join([item] * (SIZE // 3))}]}}'.encode()
    with pytest.raises(InvalidField, match='may have the character'):
        parse_object(body)


@pytest.mark.parametrize(('begin', 'end'), [('{"a":', '}'), ('[', ']')])
def test_bodies_may_have_five_hundred_levels(begin: str, end: str) -> None:
    """Lists and objects, with the body as the first level, are nested at most 500 levels deep."""
    for depth in (500, 501, 100_000):
        body = f'{{"b":{begin * (depth - 1)}1{end * (depth - 1)}}}'.encode()
        if depth == 500:
            assert parse_object(body)
            continue
        with pytest.raises(InvalidField, match='at most 500 levels'):
            parse_object(body)


def test_long_numbers_are_parsed_equally_in_long_and_short_bodies() -> None:
    """A number is parsed to the same value in a long body and in a short body."""
    text = '[0,-1,9007199254740993,123456789012345678901234567890,1.5,1e3]'
    short = parse_object(f'{{"a":{text}}}'.encode())
    long = parse_object(f'{{"a":{text},"b":"{"x" * 2 * MIB}"}}'.encode())
    assert long['a'] == short['a'] == [0, -1, 9007199254740993, 123456789012345678901234567890, 1.5, 1000.0]
