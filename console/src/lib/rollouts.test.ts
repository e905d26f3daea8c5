import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { describe, expect, test } from 'vitest';
import { Role } from 'twinkle-grpc/api/data/v1/message_pb';
import { RolloutGroupSummarySchema, RolloutSchema } from 'twinkle-grpc/api/gateway/v1/rollout_service_pb';
import { Dtype, TensorSchema } from 'twinkle-grpc/api/tensor/v1/tensor_pb';
import {
  groupKey,
  hasSamePrompt,
  mergeGroups,
  moved,
  rewardLines,
  segmentsOf,
  signed,
  stepsOf,
  tokensOf,
} from './rollouts';
import { int32Tensor } from 'twinkle-grpc';

const group = (step: number, groupId: string, rewards: [number, number, number, number]) => {
  const [count, mean, minimum, maximum] = rewards;
  return create(RolloutGroupSummarySchema, {
    step: BigInt(step),
    groupId,
    rollouts: Array.from({ length: 3 }, (_, index) => ({ rolloutId: `${step}/${groupId}/${index}`, index })),
    reward: { count, mean, minimum, maximum },
    isDegenerate: count > 0 && minimum === maximum,
  });
};

const floats = (values: number[]) =>
  create(TensorSchema, {
    dtype: Dtype.FLOAT32,
    shape: [BigInt(values.length)],
    data: new Uint8Array(new Float32Array(values).buffer),
  });

const rollout = (init: MessageInitShape<typeof RolloutSchema>) => create(RolloutSchema, init);

const GROUPS = [
  group(7, 'a', [3, 0.5, 0, 1]),
  group(7, 'b', [1, 0.9, 0.9, 0.9]),
  group(5, 'a', [0, 0, 0, 0]),
  group(2, 'c', [2, -1, -2, 0]),
];

describe('steps', () => {
  test('have the mean of all rewards, their range, and the number of groups without signal', () => {
    expect(stepsOf(GROUPS)).toMatchObject([
      { step: 7, minimum: 0, maximum: 1, degenerateCount: 1 },
      { step: 5, mean: NaN, minimum: NaN, maximum: NaN, degenerateCount: 0 },
      { step: 2, mean: -1, minimum: -2, maximum: 0 },
    ]);
    expect(stepsOf(GROUPS)[0]?.mean).toBeCloseTo((3 * 0.5 + 0.9) / 4);
  });

  test('without rewards are absent from the curves, which ascend by step', () => {
    const lines = rewardLines(stepsOf(GROUPS));
    expect(lines.map(({ label, steps, values }) => [label, steps, values[0]])).toEqual([
      ['max', [2, 7], 0],
      ['mean', [2, 7], -1],
      ['min', [2, 7], -2],
    ]);
  });
});

test('newly read groups replace those of the same and later steps', () => {
  const fresh = [group(9, 'a', [1, 1, 1, 1]), group(7, 'a', [3, 0.75, 0, 1])];
  expect(mergeGroups(GROUPS, fresh, 7).map(groupKey)).toEqual(['9/a', '7/a', '5/a', '2/c']);
});

describe('keys', () => {
  const rows = stepsOf(GROUPS);
  const press = (group: string, place: number, key: string) => {
    const selection = moved(rows, { group, place }, key);
    return selection && `${selection.group} ${selection.place}`;
  };

  test('select the next and previous group, step and rollout', () => {
    expect(press('7/b', 2, 'ArrowDown')).toBe('5/a 0');
    expect(press('5/a', 0, 'ArrowUp')).toBe('7/b 0');
    expect(press('7/b', 0, 'PageDown')).toBe('5/a 0');
    expect(press('5/a', 1, 'PageUp')).toBe('7/a 0');
    expect(press('7/a', 0, 'ArrowRight')).toBe('7/a 1');
    expect(press('7/a', 2, 'ArrowLeft')).toBe('7/a 1');
    expect([press('5/a', 0, 'Home'), press('5/a', 0, 'End')]).toEqual(['7/a 0', '2/c 0']);
  });

  test('stay at the ends, and other keys select nothing', () => {
    expect(press('7/a', 0, 'ArrowUp')).toBe('7/a 0');
    expect(press('2/c', 0, 'PageDown')).toBe('2/c 0');
    expect(press('7/a', 2, 'ArrowRight')).toBe('7/a 2');
    expect(press('7/a', 0, 'x')).toBeUndefined();
    expect(moved([], { group: '', place: 0 }, 'ArrowDown')).toBeUndefined();
  });
});

test('version spans are completed with the tokens that were not sampled', () => {
  const { versionSpans } = rollout({
    versionSpans: [
      { version: 3n, beginToken: 1, endToken: 4 },
      { version: 4n, beginToken: 6, endToken: 9 },
    ],
  });
  expect(segmentsOf(versionSpans, 8).map(({ begin, end, version }) => [begin, end, version])).toEqual([
    [0, 1, undefined],
    [1, 4, 3],
    [4, 6, undefined],
    [6, 8, 4],
  ]);
  expect(segmentsOf([], 0)).toEqual([]);
});

describe('tokens', () => {
  const decode = (id: number) => ({ text: `<${id}>`, isSpecial: false });

  test('have the advantage of the completion, unless they were not sampled', () => {
    const tokens = tokensOf(
      rollout({ tokenIds: int32Tensor([7, 8]), logprobs: floats([-0.5, NaN]), advantage: 1.5 }),
      decode,
    );
    expect(tokens).toEqual([
      { id: 7, text: '<7>', isSpecial: false, logprob: -0.5, advantage: 1.5 },
      { id: 8, text: '<8>', isSpecial: false, logprob: NaN, advantage: NaN },
    ]);
  });

  test('have their own advantages if the program stored them', () => {
    const tokens = tokensOf(
      rollout({ tokenIds: int32Tensor([7, 8]), tokenAdvantages: floats([0.25, -0.5]), advantage: 9 }),
      decode,
    );
    expect(tokens.map(({ advantage }) => advantage)).toEqual([0.25, -0.5]);
  });
});

test('prompts are compared by chat, text and tokens', () => {
  const chat = (text: string) =>
    rollout({ promptChat: { messages: [{ role: Role.USER, parts: [{ part: { case: 'text', value: text } }] }] } });
  expect(hasSamePrompt([chat('a'), chat('a')])).toBe(true);
  expect(hasSamePrompt([chat('a'), chat('b')])).toBe(false);
  expect(hasSamePrompt([rollout({ promptTokenIds: int32Tensor([1]) }), rollout({})])).toBe(false);
});

test('positive numbers have a sign', () => {
  expect([0.5, 0, -0.5].map(signed)).toEqual(['+0.5', '0', '−0.5']);
});
