import { expect, test } from 'vitest';
import { encodedRow, firstLines } from './rows';

test('a line counts only when it is complete', () => {
  expect(firstLines('{"a":1}\n{"a":2}\n{"a"', 5, false)).toEqual(['{"a":1}', '{"a":2}']);
  expect(firstLines('{"a":1}\n{"a":2}', 5, true)).toHaveLength(2);
  expect(firstLines('{"a":1}\n{"a":2}\n', 1, true)).toHaveLength(1);
});

test('a token is trained if the label of its predecessor is set', () => {
  const row = { input_ids: [5, 6, 7], labels: [-100, 7, -100] };
  expect(encodedRow(row)).toEqual({ ids: [5, 6, 7], isTrained: [false, false, true] });
});

test('a row without tokens is not encoded', () => {
  expect(encodedRow({ messages: [] })).toBeUndefined();
});
