import { expect, test } from 'vitest';
import { ApiError, failureOf } from './failure';

test('a failure of a route has the request id, with which the services log the call', () => {
  expect(failureOf(new ApiError(401, 'invalid key', 'CREDENTIALS_INVALID', '', 'r-1'))).toEqual({
    message: 'invalid key',
    reason: 'CREDENTIALS_INVALID',
    field: '',
    code: '401',
    requestId: 'r-1',
  });
});
