import { describe, expect, test } from 'vitest';
import { align, insert, lowerBound, merge, smooth } from './curves';

const curve = (name: string, steps: number[], values: number[], pointCount = steps.length) => ({
  name,
  steps,
  values,
  pointCount,
});

describe('merge', () => {
  test('replaces the points from the begin step on, and adds new metrics by name', () => {
    const merged = merge(
      [curve('loss', [0, 1, 2], [9, 8, 7])],
      [curve('loss', [2, 3], [6, 5]), curve('kl', [3], [1])],
      2,
    );
    expect(merged).toEqual([curve('kl', [3], [1]), curve('loss', [0, 1, 2, 3], [9, 8, 6, 5])]);
  });

  test('keeps curves without new points', () => {
    const old = curve('reward/mean', [1], [0.5]);
    expect(merge([old], [], 1)).toEqual([old]);
  });
});

describe('insert', () => {
  test('adds points by step, replaces those with equal steps, and counts only new ones', () => {
    const old = [curve('loss', [1, 5, 9], [1, 5, 9], 100), curve('rate', [1], [0.1])];
    const fresh = [curve('kl', [2], [2]), curve('loss', [5, 7, 12], [50, 7, 12])];
    const after = insert(old, fresh);
    expect(after).toEqual([
      curve('kl', [2], [2]),
      curve('loss', [1, 5, 7, 9, 12], [1, 50, 7, 9, 12], 102),
      curve('rate', [1], [0.1]),
    ]);
    expect(insert(after, fresh)).toEqual(after);
    expect(old[0]?.steps).toEqual([1, 5, 9]);
  });

  test('keeps values that are no numbers', () => {
    expect(insert([curve('loss', [1], [NaN])], [curve('loss', [1, 0], [2, NaN])])[0]?.values).toEqual([NaN, 2]);
  });
});

describe('align', () => {
  test('continues lines over steps that a curve lacks, and interrupts them at values that cannot be drawn', () => {
    const rows = align([curve('a', [0, 2], [1, NaN]), curve('b', [1, 2], [3, 4])], false);
    expect(rows).toEqual([
      [0, 1, 2],
      [1, undefined, null],
      [undefined, 3, 4],
    ]);
  });

  test('omits values that are not positive from a logarithmic axis', () => {
    expect(align([curve('a', [0, 1, 2], [-1, 0, 1])], true)[1]).toEqual([null, null, 1]);
  });
});

test('smoothing starts with the first value and keeps values that are not finite', () => {
  const values = smooth([4, 2, Infinity, 2], 0.5);
  expect(values[0]).toBe(4);
  expect(values[1]).toBeCloseTo((0.5 * 4 * 0.5 + 0.5 * 2) / 0.75);
  expect(values[2]).toBe(Infinity);
  expect(values[3]).toBeLessThan(values[1] ?? 0);
});

test('the lower bound is the first element that is not smaller', () => {
  expect([0, 1, 2, 9].map((value) => lowerBound([1, 2, 2, 5], value))).toEqual([0, 0, 1, 4]);
});
