import { expect, test } from 'vitest';
import { labelsOf } from './runs';

test('a tag is split at its first equals sign, and tags without a key are ignored', () => {
  expect(labelsOf(['task=a=b', 'plain', '=x', 'empty='])).toEqual({ task: 'a=b', empty: '' });
});
