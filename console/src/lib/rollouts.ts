// Functions for rollouts: steps with their rewards, the selected rollout, and the tokens of a completion.
import type { Rollout, RolloutGroupSummary } from 'twinkle-grpc/api/gateway/v1/rollout_service_pb';
import type { VersionSpan } from 'twinkle-grpc/api/sampler/v1/sampling_pb';
import { decimal } from './format';
import { plain } from './json';
import type { Line } from './plot';
import { elements } from 'twinkle-grpc';

/** A step with its groups, and statistics of their finite rewards. */
export interface StepRow {
  step: number;
  /** By ascending id. */
  groups: RolloutGroupSummary[];
  /** NaN without rewards, as are `minimum` and `maximum`. */
  mean: number;
  minimum: number;
  maximum: number;
  degenerateCount: number;
}

/** The steps of groups, newest first. The groups must be ordered by descending step. */
export function stepsOf(groups: RolloutGroupSummary[]): StepRow[] {
  const byStep = new Map<number, RolloutGroupSummary[]>();
  for (const group of groups) {
    const step = Number(group.step);
    byStep.set(step, [...(byStep.get(step) ?? []), group]);
  }
  return [...byStep].map(([step, members]) => {
    const rewards = members.flatMap(({ reward }) => (reward?.count ? [reward] : []));
    const count = rewards.reduce((sum, reward) => sum + reward.count, 0);
    return {
      step,
      groups: members,
      mean: count ? rewards.reduce((sum, reward) => sum + reward.count * reward.mean, 0) / count : NaN,
      minimum: count ? Math.min(...rewards.map(({ minimum }) => minimum)) : NaN,
      maximum: count ? Math.max(...rewards.map(({ maximum }) => maximum)) : NaN,
      degenerateCount: members.filter(({ isDegenerate }) => isDegenerate).length,
    };
  });
}

/** Curves of the rewards over the steps that have rewards. */
export function rewardLines(rows: StepRow[]): Line[] {
  const rewarded = rows.filter(({ mean }) => !Number.isNaN(mean)).reverse();
  const line = (label: string, slot: number, value: (row: StepRow) => number): Line => ({
    label,
    slot,
    steps: rewarded.map(({ step }) => step),
    values: rewarded.map(value),
  });
  return [
    line('max', 2, ({ maximum }) => maximum),
    line('mean', 0, ({ mean }) => mean),
    line('min', 1, ({ minimum }) => minimum),
  ];
}

/** Replaces the groups from `beginStep` on with `fresh`. Both lists are ordered by descending step. */
export const mergeGroups = (
  groups: RolloutGroupSummary[],
  fresh: RolloutGroupSummary[],
  beginStep: number,
): RolloutGroupSummary[] => [...fresh, ...groups.filter(({ step }) => Number(step) < beginStep)];

/** Name of a group within its run, with which the id of a rollout begins. */
export const groupKey = ({ step, groupId }: RolloutGroupSummary): string => `${step}/${groupId}`;

export interface Selection {
  /** See `groupKey`. */
  group: string;
  /** Index of the rollout in the group's list. */
  place: number;
}

/** The selection after a key press. Undefined if the key selects nothing, or if there are no groups. */
export function moved(rows: StepRow[], { group, place }: Selection, key: string): Selection | undefined {
  const groups = rows.flatMap((row) => row.groups);
  const index = Math.max(
    0,
    groups.findIndex((member) => groupKey(member) === group),
  );
  const current = groups[index];
  if (!current) {
    return undefined;
  }
  const row = rows.findIndex(({ groups: members }) => members.includes(current));
  const select = (next: RolloutGroupSummary | undefined): Selection => ({ group: groupKey(next ?? current), place: 0 });
  const turn = (distance: number): Selection => ({
    group: groupKey(current),
    place: Math.min(Math.max(place + distance, 0), current.rollouts.length - 1),
  });
  const selections: Record<string, () => Selection> = {
    ArrowDown: () => select(groups[index + 1]),
    ArrowUp: () => select(groups[index - 1]),
    PageDown: () => select(rows[row + 1]?.groups[0]),
    PageUp: () => select(rows[row - 1]?.groups[0]),
    Home: () => select(groups[0]),
    End: () => select(groups.at(-1)),
    ArrowRight: () => turn(1),
    ArrowLeft: () => turn(-1),
  };
  return selections[key]?.();
}

/** Consecutive tokens that one version sampled, or that were not sampled. */
export interface Segment {
  begin: number;
  end: number;
  /** 0 is the base model. Undefined for tokens that were not sampled. */
  version: number | undefined;
}

/** The segments of a completion: its version spans, and the tokens outside them, which were not sampled. */
export function segmentsOf(spans: VersionSpan[], tokenCount: number): Segment[] {
  const segments: Segment[] = [];
  let begin = 0;
  const add = (end: number, version: number | undefined): void => {
    if (end > begin) {
      segments.push({ begin, end, version });
      begin = end;
    }
  };
  for (const span of spans) {
    add(Math.min(span.beginToken, tokenCount), undefined);
    add(Math.min(span.endToken, tokenCount), Number(span.version));
  }
  add(tokenCount, undefined);
  return segments;
}

export const versionName = (version: number | undefined): string =>
  version === undefined ? 'not sampled' : version ? `version ${version}` : 'base model';

export interface RolloutToken {
  id: number;
  text: string;
  isSpecial: boolean;
  /** Natural log-probability. NaN where the log-probability is not known. */
  logprob: number;
  /** NaN where the advantage is not known. */
  advantage: number;
}

/** The tokens of a completion. Sampled tokens without an advantage have the advantage of the completion. */
export function tokensOf(
  rollout: Rollout,
  decode: (id: number) => { text: string; isSpecial: boolean },
): RolloutToken[] {
  const logprobs = elements(rollout.logprobs);
  const advantages = elements(rollout.tokenAdvantages);
  return elements(rollout.tokenIds).map((id, index) => {
    const logprob = logprobs[index] ?? NaN;
    const isSampled = !rollout.logprobs || !Number.isNaN(logprob);
    const advantage = advantages[index] ?? (isSampled ? rollout.advantage : undefined) ?? NaN;
    return { id, ...decode(id), logprob, advantage };
  });
}

/** Whether rollouts have the same prompt. */
export function hasSamePrompt(rollouts: Rollout[]): boolean {
  const prompts = rollouts.map(({ promptChat, promptText, promptTokenIds }) =>
    JSON.stringify(plain([promptChat ?? null, promptText, promptTokenIds ?? null])),
  );
  return new Set(prompts).size <= 1;
}

/** A number with its sign. */
export const signed = (value: number): string => (value > 0 ? `+${decimal(value)}` : decimal(value));
