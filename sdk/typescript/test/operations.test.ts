import { Code } from '@connectrpc/connect';
import { expect, test } from 'vitest';
import { errorFrom } from '../src/errors.js';
import { OperationLog } from '../src/operations.js';
import { refusal, type Refusal } from './fakes.js';

/** A service that records operations by number, as the model service does, and can fail. */
class FakeService {
  readonly record = new Map<bigint, string>();
  /** Failures of the next operations, by their names. */
  readonly failures = new Map<string, { code: Code; facts: Refusal; isApplied: boolean }>();
  readonly filled: bigint[] = [];

  fail(name: string, code: Code, disposition: string, { isApplied = false, reason = 'SOME_REASON' } = {}): void {
    this.failures.set(name, { code, facts: { disposition, reason }, isApplied });
  }

  send = (number: bigint, name: string): Promise<string> => {
    const failure = this.failures.get(name);
    this.failures.delete(name);
    if (!failure || failure.isApplied) {
      const earlier = this.record.get(number);
      if (earlier !== undefined && earlier !== name) {
        return Promise.reject(errorFrom(refusal(Code.Aborted, 'reused', { reason: 'SEQUENCE_REUSED' })));
      }
      this.record.set(number, name);
    }
    return failure
      ? Promise.reject(errorFrom(refusal(failure.code, 'failed', failure.facts)))
      : Promise.resolve(`${number}:${name}`);
  };

  fill = async (number: bigint): Promise<void> => {
    this.filled.push(number);
    await this.send(number, 'fill');
  };

  find = (number: bigint): Promise<void> =>
    this.record.has(number)
      ? Promise.resolve()
      : Promise.reject(errorFrom(refusal(Code.NotFound, 'never accepted', { reason: 'OPERATION_NOT_FOUND' })));

  lastNumber = (): Promise<bigint> => Promise.resolve(BigInt(this.record.size));
}

const logOf = (service: FakeService, lastNumber = 0n): OperationLog<string, string> =>
  new OperationLog(service, lastNumber);

test('operations are numbered in the order of their starts', async () => {
  const service = new FakeService();
  const log = logOf(service, 4n);
  expect(await Promise.all(['a', 'b', 'c'].map((name) => log.run(name)))).toEqual(['5:a', '6:b', '7:c']);
  expect(log.lastNumber).toBe(7n);
});

test('the number of a refused operation is used again', async () => {
  const service = new FakeService();
  const log = logOf(service);
  service.fail('a', Code.InvalidArgument, 'REFUSED');
  await expect(log.run('a')).rejects.toThrow('failed');
  expect(await log.run('b')).toBe('1:b');
});

test('the number of a failed operation is used up', async () => {
  const service = new FakeService();
  const log = logOf(service);
  service.fail('a', Code.FailedPrecondition, 'FAILED', { isApplied: true });
  await expect(log.run('a')).rejects.toThrow('failed');
  expect(await log.run('b')).toBe('2:b');
});

test('a refused number that later operations wait for is filled', async () => {
  const service = new FakeService();
  const log = logOf(service);
  service.fail('a', Code.InvalidArgument, 'REFUSED');
  const results = await Promise.allSettled([log.run('a'), log.run('b')]);
  expect(results.map(({ status }) => status)).toEqual(['rejected', 'fulfilled']);
  expect(service.filled).toEqual([1n]);
  expect(await log.run('c')).toBe('3:c');
});

test.each([
  [true, '2:b'],
  [false, '1:b'],
])('a lost response (applied: %s) is looked up before the next operation', async (isApplied, next) => {
  const service = new FakeService();
  const log = logOf(service);
  service.fail('a', Code.Unavailable, 'INTERRUPTED', { isApplied });
  await expect(log.run('a')).rejects.toThrow('failed');
  expect(await log.run('b')).toBe(next);
});

test('a cancelled operation does not block later ones', async () => {
  const service = new FakeService();
  const log = logOf(service);
  service.fail('a', Code.Canceled, 'UNKNOWN');
  await Promise.allSettled([log.run('a'), log.run('b')]);
  expect(service.filled).toEqual([1n]);
  expect([...service.record.values()].sort()).toEqual(['b', 'fill']);
});

test('after a conflict of numbers, the next number is that of the service', async () => {
  const service = new FakeService();
  const log = logOf(service, 0n);
  service.record.set(1n, 'of another program').set(2n, 'of another program');
  await expect(log.run('a')).rejects.toThrow('reused');
  expect(await log.run('b')).toBe('3:b');
});
