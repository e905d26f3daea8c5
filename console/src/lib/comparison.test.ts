import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { Role } from 'twinkle-grpc/api/data/v1/message_pb';
import { RolloutGroupSummarySchema, RolloutSchema } from 'twinkle-grpc/api/gateway/v1/rollout_service_pb';
import {
  answerOf,
  comparisonOf,
  EVALUATION,
  isSamePrompt,
  playgroundValues,
  questionOf,
  versionsOf,
} from './comparison';
import { int32Tensor } from 'twinkle-grpc';

const group = (step: number, groupId: string, prompts: string[]) =>
  create(RolloutGroupSummarySchema, {
    step: BigInt(step),
    groupId,
    updateTime: { seconds: 5n, nanos: step },
    rollouts: prompts.map((promptPreview, index) => ({
      rolloutId: `${step}/${groupId}/${index}`,
      index,
      promptPreview,
      oldestVersion: BigInt(step),
      newestVersion: BigInt(step),
    })),
  });

const ids = (...lists: Parameters<typeof comparisonOf>): string[] =>
  comparisonOf(...lists).pairs.map(({ before, after }) => `${before.rolloutId} ${after.rolloutId}`);

const rollout = (init: MessageInitShape<typeof RolloutSchema>) => create(RolloutSchema, init);
const message = (role: Role, text: string) => ({ role, parts: [{ part: { case: 'text' as const, value: text } }] });
const chat = (...messages: ReturnType<typeof message>[]) => rollout({ promptChat: { messages } });

describe('a comparison', () => {
  test('pairs answers to fixed questions by position, even if the beginnings of questions are equal', () => {
    const [early, late] = [group(0, EVALUATION, ['a', 'a', 'b']), group(9, EVALUATION, ['a', 'a', 'c'])];
    expect(ids([early], [late])).toEqual(['0/evaluation/0 9/evaluation/0', '0/evaluation/1 9/evaluation/1']);
    expect(comparisonOf([early], [late])).toMatchObject({ beforeStep: 0, afterStep: 9 });
  });

  test('pairs the first rollouts of equal prompts of other groups, in the order of the last step', () => {
    const oldest = [group(1, 'x', ['a', 'a']), group(1, 'y', ['b', '']), group(2, 'x', ['c'])];
    const newest = [group(7, 'p', ['b', 'b']), group(7, 'q', ['a', '', 'd']), group(6, 'q', ['c'])];
    expect(ids(oldest, newest)).toEqual(['1/y/0 7/p/0', '1/x/0 7/q/0']);
  });

  test('needs two steps', () => {
    const only = [group(3, 'x', ['a'])];
    expect([comparisonOf(only, only).pairs, comparisonOf([], []).pairs]).toEqual([[], []]);
  });

  test('has another key if a compared group changes', () => {
    const [early, late] = [group(1, 'x', ['a']), group(7, 'x', ['a'])];
    const changed = group(7, 'x', ['a']);
    changed.updateTime!.seconds = 6n;
    expect(comparisonOf([early], [late]).key).toBe(comparisonOf([early], [late]).key);
    expect(comparisonOf([early], [changed]).key).not.toBe(comparisonOf([early], [late]).key);
  });
});

test('prompts are compared in the first form that both rollouts have', () => {
  const tokens = (...ids: number[]) => ({ promptTokenIds: int32Tensor(ids) });
  const asked = (text: string, others = {}) =>
    rollout({ promptChat: { messages: [message(Role.USER, text)] }, ...others });
  expect(isSamePrompt(asked('q', tokens(1)), asked('q'))).toBe(true);
  expect(isSamePrompt(asked('q', tokens(1)), asked('r', tokens(1)))).toBe(false);
  expect(isSamePrompt(asked('q', tokens(1)), rollout(tokens(1)))).toBe(true);
  expect(isSamePrompt(rollout({ promptText: 'a' }), rollout({ promptText: 'b' }))).toBe(false);
  expect(isSamePrompt(rollout({}), rollout({}))).toBe(false);
});

test('questions and answers are texts of chats, or the stored texts', () => {
  expect(questionOf(chat(message(Role.SYSTEM, 's'), message(Role.USER, 'q')))).toBe('q');
  expect(questionOf(rollout({ promptText: 'p' }))).toBe('p');
  expect(answerOf(rollout({ completionText: 'c' }))).toBe('c');
  expect(answerOf(rollout({ completionMessages: [message(Role.ASSISTANT, 'a')] }))).toBe('a');
});

test('the versions of a rollout are one version, several, or not known', () => {
  const summary = (oldestVersion?: bigint, newestVersion?: bigint) => {
    const [first] = group(0, 'x', ['a']).rollouts;
    return versionsOf({ ...first!, oldestVersion, newestVersion });
  };
  expect([summary(0n, 0n), summary(3n, 3n), summary(3n, 4n), summary()]).toEqual([
    'base model',
    'version 3',
    'versions 3 to 4',
    '',
  ]);
});

describe('the address of the playground', () => {
  const values = (source: Parameters<typeof playgroundValues>[1]) => playgroundValues('ad-1', source, 4n);

  test('has a question with its system message, or a text', () => {
    const common = { run: 'ad-1', version: '4', temperature: '0' };
    expect(values(chat(message(Role.USER, 'q')))).toEqual({ ...common, prompt: 'q', system: '' });
    expect(values(chat(message(Role.SYSTEM, 's'), message(Role.USER, 'q')))).toMatchObject({
      prompt: 'q',
      system: 's',
    });
    expect(values(rollout({ promptText: 'p' }))).toEqual({ ...common, kind: 'text', prompt: 'p' });
  });

  test('does not exist for several turns and for tokens', () => {
    const turns = [message(Role.USER, 'q'), message(Role.ASSISTANT, 'a'), message(Role.USER, 'r')];
    expect([values(chat(...turns)), values(chat(message(Role.SYSTEM, 's'))), values(rollout({}))]).toEqual([
      undefined,
      undefined,
      undefined,
    ]);
  });
});
