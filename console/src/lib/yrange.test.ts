import uPlot from 'uplot';
import { expect, test } from 'vitest';
import { widened } from './yrange';

test('a range of rounding errors is widened around its middle', () => {
  const [min, max] = widened(0.99999991, 1.00000004);
  expect(max - min).toBeCloseTo(1e-4, 10);
  expect((min + max) / 2).toBeCloseTo(1, 7);
  expect(widened(-5, -5)).toEqual([-5.00025, -4.99975]);
});

test('other ranges stay, also tiny ones around zero', () => {
  for (const [min, max] of [
    [0, 2],
    [1e-30, 2e-30],
    [0, 0],
    [-8.5e-8, 4.8e-8],
  ] as const) {
    expect(widened(min, max)).toEqual([min, max]);
  }
});

test('uPlot makes no empty range of a widened one', () => {
  for (let power = -30; power < 30; power += 1) {
    for (const [factor, spread] of [
      [1, 1e-7],
      [0.99999991, 1.3e-7],
      [1.000001, 0],
      [-3, 1e-16],
    ] as const) {
      const value = factor * 10 ** power;
      const [low, high] = widened(value, value + Math.abs(value) * spread);
      const [min, max] = uPlot.rangeNum(low, high, 0.1, true);
      expect(max).toBeGreaterThan(min ?? NaN);
    }
  }
});
