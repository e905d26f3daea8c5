import { expect, test } from 'vitest';
import { advantageTone, logprobTone } from './tones';

test('a log-probability has a level by its probability, and an unknown one is masked', () => {
  expect([0.95, 0.5, 0.3, 0.1, 0.01].map((probability) => logprobTone(Math.log(probability)))).toEqual([
    'level-0',
    'level-1',
    'level-2',
    'level-3',
    'level-4',
  ]);
  expect(logprobTone(NaN)).toBe('masked');
});

test('an advantage has a level by its size relative to the largest one', () => {
  expect([-3, -1.5, 0, 0.1, 2.9, 7].map((advantage) => advantageTone(advantage, 3))).toEqual([
    'negative-3',
    'negative-2',
    'level-0',
    'positive-1',
    'positive-3',
    'positive-3',
  ]);
  expect(advantageTone(0, 0)).toBe('level-0');
  expect(advantageTone(NaN, 3)).toBe('masked');
});

test('the largest advantage has the highest level, whichever way it is rounded', () => {
  const advantages = Array.from({ length: 1000 }, (_, index) => 1 + index / 997);
  expect(new Set(advantages.map((advantage) => advantageTone(advantage, advantage)))).toEqual(new Set(['positive-3']));
});
