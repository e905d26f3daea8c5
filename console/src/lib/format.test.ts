import { timestampFromMs } from '@bufbuild/protobuf/wkt';
import { expect, test } from 'vitest';
import { age, bytes, count, decimal, percent, span } from './format';

test('numbers keep four significant digits', () => {
  expect([0, 0.123456, 12345.678, 0.00012345, -3.5, NaN, -Infinity].map((value) => decimal(value))).toEqual([
    '0',
    '0.1235',
    '12350',
    '1.23e−4',
    '−3.5',
    'NaN',
    '−∞',
  ]);
});

test('large integers are grouped exactly', () => {
  expect(count(9007199254740993n)).toBe('9,007,199,254,740,993');
});

test('sizes, shares and times have units', () => {
  expect([999, 1500, 2_340_000_000].map(bytes)).toEqual(['999 B', '1.5 kB', '2.3 GB']);
  expect([0, 0.0001, 0.034, 0.5, 0.997, 1].map(percent)).toEqual([
    '0 %',
    '< 0.1 %',
    '3.4 %',
    '50 %',
    '99.7 %',
    '100 %',
  ]);
  expect([0, 0.0123, 1.25, 59, 3599, 90_000, 400_000].map(span)).toEqual([
    '0 ms',
    '12 ms',
    '1.3 s',
    '59 s',
    '59 min',
    '25 h',
    '4 d',
  ]);
});

test('an age is the time since a moment', () => {
  expect(age(timestampFromMs(1_000), 61_500)).toBe('1 min ago');
  expect(age(timestampFromMs(61_000), 61_500)).toBe('now');
});
