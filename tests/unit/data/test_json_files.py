"""JSON is read one object at a time, and the memory that parsing needs is estimated first."""

import io
import json
import random
import sys
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from twinkle.dataset import UnreadableFile
from twinkle_services.data.backends.bounded.json_files import parsed_bytes, rows_of_lines, rows_of_list


class Counted:
    """Bounds that count bytes."""

    size_bytes = peak_bytes = 0

    def charge(self, size_bytes: int, row_count: int = 0) -> None:
        """Count bytes."""
        del row_count
        self.size_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.size_bytes)


class Trickle(io.StringIO):
    """A file whose reads return at most three characters, so a piece may end at any character."""

    def read(self, size: int | None = -1, /) -> str:
        """Return at most three characters."""
        return super().read(3)


ITEMS = [
    *('{}', '[]', '""', '"xy"', '"é"', '"\\u1234"', '1.5', '-12345678901234567890', 'true', '{"a":{"b":[]}}', '[[[]]]'),
    *('{' + ','.join(f'"k{index}":""' for index in range(count)) + '}' for count in (1, 6, 11)),
]  # fmt: skip
"""JSON values of several types and sizes."""
TEXTS = {
    **{item: '[' + ','.join([item] * 20_000) + ']' for item in ITEMS},
    'one object': '{' + ','.join(f'"{index}":{{}}' for index in range(20_000)) + '}',
    'one text': '"' + 'x' * 100_000 + '"',
    'one text with a long character': '"' + 'x' * 100_000 + chr(0x1F600) + '"',
    'one text with an escape': '"' + 'x' * 100_000 + '\\ud83d\\ude00"',
}
"""JSON texts by name: lists that repeat an item, and single large values."""


@pytest.mark.parametrize('name', TEXTS)
def test_parsed_text_takes_at_most_the_estimated_memory(name: str) -> None:
    """The estimate is at least the peak memory of parsing the text, and at most about twenty times that peak."""
    line = f'{{"row": {TEXTS[name]}}}'
    tracemalloc.start()
    rows = list(rows_of_lines('a', [line]))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows
    assert peak_bytes + sys.getsizeof(line) <= parsed_bytes(line) + 4096
    assert parsed_bytes(line) <= 20 * peak_bytes + 4096


@pytest.mark.parametrize('opened', [io.StringIO, Trickle])
def test_list_is_read_in_pieces(opened: type[io.StringIO]) -> None:
    """Pieces may end at any character, and only a part of a long list is in memory at a time."""
    rng = random.Random(0)
    rows: list[dict[str, Any]] = [{'x': 'y' * rng.choice([0, 1, 5]), 'z': [index, {}]} for index in range(300)]
    if opened is io.StringIO:
        rows += [{'x': 'long' * 50_000}, *rows * 100]
    bounds = Counted()
    text = json.dumps(rows, indent=1)
    assert list(rows_of_list('a', opened(text), bounds)) == rows
    assert (bounds.size_bytes, 0 < bounds.peak_bytes < 20 * (1 << 20)) == (0, True)
    assert list(rows_of_list('a', opened(' [ ]\n'), bounds)) == []


def _all(rows: Iterator[Any]) -> None:
    for _ in rows:
        pass


@pytest.mark.parametrize('opened', [io.StringIO, Trickle])
@pytest.mark.parametrize(
    ('text', 'problem'),
    [
        ('', 'a list'),
        ('{"a": 1}', 'a list'),
        ('[', 'item 0 is not JSON'),
        ('[{"a": 1}', 'item 0'),
        ('[{"a": 1},]', 'item 1'),
        ('[{"a": 1} {}]', 'item 0'),
        ('[{"a": 1}] x', 'follows'),
        ('[{"a": 1}, 123]', 'item 1 must be an object'),
        ('[{"a": }]', 'item 0'),
        ('[{"a": 1, "a": 2}]', "'a' twice"),
        ('[{"a": {"b": 1, "b": 2}}]', "'b' twice"),
    ],
)
def test_text_that_is_not_a_list_of_objects_is_refused(text: str, problem: str, opened: type[io.StringIO]) -> None:
    """The error describes the problem, and all counted bytes are released."""
    bounds = Counted()
    with pytest.raises(UnreadableFile, match=problem):
        _all(rows_of_list('a', opened(text), bounds))
    assert bounds.size_bytes == 0


def test_long_object_of_a_list_is_refused() -> None:
    """The length of an object in a bounded file is limited, because an object is parsed in one step."""
    text = '[{"a": "' + 'x' * (9 << 20) + '"}]'
    with pytest.raises(UnreadableFile, match='characters'):
        _all(rows_of_list('a', io.StringIO(text), Counted()))
    assert len(list(rows_of_list('a', io.StringIO(text)))) == 1
