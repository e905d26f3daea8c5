import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { ExportSchema, ExportState } from 'twinkle-grpc/api/gateway/v1/export_service_pb';
import { isFinished, linkOf, needsToken, progressOf, toneOf } from './exports';

const push = (init: MessageInitShape<typeof ExportSchema>) => create(ExportSchema, init);

test('a push with a failure waits for its next attempt until it is finished', () => {
  const failure = { message: 'the hub does not answer' };
  expect(toneOf(push({ state: ExportState.WAITING }))).toBe('quiet');
  expect(toneOf(push({ state: ExportState.WAITING, failure }))).toBe('warn');
  expect(toneOf(push({ state: ExportState.FAILED, failure }))).toBe('bad');
  expect(
    [ExportState.RUNNING, ExportState.DONE, ExportState.CANCELLED].map((state) => isFinished(push({ state }))),
  ).toEqual([false, true, true]);
});

test('the progress is unknown until the size is known', () => {
  expect(progressOf(push({}))).toBeNaN();
  expect(progressOf(push({ readBytes: 25n, sizeBytes: 100n }))).toBe(0.25);
});

test('only secure addresses are links', () => {
  expect(linkOf(push({ url: 'https://huggingface.co/me/maths' }))).toBe('https://huggingface.co/me/maths');
  expect(linkOf(push({ url: 'javascript:alert(1)' }))).toBe('');
  expect(linkOf(push({ url: 'file:///maths' }))).toBe('');
});

test('folders need no token', () => {
  expect(['hf://me/maths', ' file:///maths'].map(needsToken)).toEqual([true, false]);
});
