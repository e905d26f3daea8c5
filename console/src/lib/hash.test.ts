import { expect, test } from 'vitest';
import { href, parseHash } from './hash';

test('an address keeps special characters of ids, and repeated values', () => {
  const address = href(['runs', 'a/b c'], { tag: ['x=1&2', 'y=é'], text: '', model: undefined });
  const { path, query } = parseHash(address);
  expect(path).toEqual(['runs', 'a/b c']);
  expect(query.getAll('tag')).toEqual(['x=1&2', 'y=é']);
  expect([...query.keys()]).toEqual(['tag', 'tag']);
});

test('an empty hash is the start page', () => {
  expect(parseHash('')).toEqual({ path: [], query: new URLSearchParams() });
});
