import { expect, test, vi } from 'vitest';
import { href, parseHash } from './hash';

// The clients of the services need the address of the page.
vi.mock('./rpc', () => ({ traces: {} }));
const { filterOf, NO_FILTER, queryOf, requestOf } = await import('./traces');

test('a filter survives in the address of the page', () => {
  const filter = { ...NO_FILTER, requestId: 'a b&c', run: 'ad-1', operation: '7', minimum: '2.5', isAllTenants: true };
  expect(filterOf(parseHash(href(['traces'], queryOf(filter))).query)).toEqual(filter);
  expect(href(['traces'], queryOf(NO_FILTER))).toBe('#/traces');
});

test('a request has valid numbers only', () => {
  const filter = { ...NO_FILTER, run: ' ad-1 ', operation: '7', minimum: '1234.5', onlyErrors: true };
  expect(requestOf(filter, 'next')).toMatchObject({
    pageToken: 'next',
    runId: 'ad-1',
    sequenceNumber: 7n,
    minDuration: { seconds: 1n, nanos: 234_500_000 },
    isError: true,
    isBackgroundIncluded: false,
  });
  for (const text of ['-5', 'x', '', 'Infinity']) {
    const request = requestOf({ ...NO_FILTER, minimum: text, operation: text }, '');
    expect(request).toMatchObject({ minDuration: undefined, sequenceNumber: 0n, isError: undefined });
  }
});

test('an operation without its run is not requested, and a request id also selects background calls', () => {
  expect(requestOf({ ...NO_FILTER, operation: '7', requestId: 'rq-1' }, '')).toMatchObject({
    sequenceNumber: 0n,
    isBackgroundIncluded: true,
  });
});
