import { expect, test } from 'vitest';
import { sparkPath } from './spark';

const SIZE = { width: 104, height: 24, margin: 2 };

test('a curve fills its size from the first to the last step', () => {
  expect(sparkPath([10, 15, 20], [4, 0, 2], SIZE)).toBe('M2.0 2.0L52.0 22.0L102.0 12.0');
});

test('values that are not finite interrupt the curve', () => {
  expect(sparkPath([0, 1, 2, 3, 4], [1, NaN, 3, Infinity, 3], SIZE)).toBe('M2.0 22.0M52.0 2.0M102.0 2.0');
  expect(sparkPath([0], [NaN], SIZE)).toBe('');
});

test('a single value, and equal values, are in the middle', () => {
  expect(sparkPath([3], [7], SIZE)).toBe('M52.0 12.0');
  expect(sparkPath([0, 1], [7, 7], SIZE)).toBe('M2.0 12.0L102.0 12.0');
});
