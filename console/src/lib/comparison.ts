// The same prompts, answered at the first and at the last step of a run.
import { Role } from 'twinkle-grpc/api/data/v1/message_pb';
import type { Rollout, RolloutGroupSummary, RolloutSummary } from 'twinkle-grpc/api/gateway/v1/rollout_service_pb';
import { turnOf } from './chats';
import type { Values } from './hash';
import { plain } from './json';
import { versionName } from './rollouts';

/** Id of the groups with answers to fixed questions. If a run has such groups, only these are compared. */
export const EVALUATION = 'evaluation';

/** The rollouts of a prompt at two steps. */
export interface Pair {
  before: RolloutSummary;
  after: RolloutSummary;
}

export interface Comparison {
  beforeStep: number;
  afterStep: number;
  pairs: Pair[];
  /** Changes with every change of the compared groups. */
  key: string;
}

const NONE: Comparison = { beforeStep: 0, afterStep: 0, pairs: [], key: '' };

/** Groups of the first step of a list. */
function firstStep(groups: RolloutGroupSummary[]): RolloutGroupSummary[] {
  return groups.filter(({ step }) => step === groups[0]?.step);
}

/**
 * Pairs the rollouts of the oldest and the newest step, which the lists begin with. Answers to fixed questions have the
 * same position in their group. Of other groups, the first rollouts with the same beginning of the prompt are paired.
 */
export function comparisonOf(oldest: RolloutGroupSummary[], newest: RolloutGroupSummary[]): Comparison {
  const [early, late] = [firstStep(oldest), firstStep(newest)];
  if (!early[0] || !late[0] || early[0].step === late[0].step) {
    return NONE;
  }
  const keyOf = (group: RolloutGroupSummary, { index, promptPreview }: RolloutSummary): string =>
    group.groupId === EVALUATION ? `${index} ${promptPreview}` : promptPreview;
  const firstByKey = (groups: RolloutGroupSummary[]): Map<string, RolloutSummary> => {
    const found = new Map<string, RolloutSummary>();
    for (const group of groups) {
      for (const rollout of group.rollouts) {
        const key = keyOf(group, rollout);
        if (key && !found.has(key)) {
          found.set(key, rollout);
        }
      }
    }
    return found;
  };
  const before = firstByKey(early);
  const pairs = [...firstByKey(late)].flatMap(([key, after]) => {
    const match = before.get(key);
    return match ? [{ before: match, after }] : [];
  });
  const times = [...early, ...late].map(({ updateTime }) => `${updateTime?.seconds}.${updateTime?.nanos}`);
  return {
    beforeStep: Number(early[0].step),
    afterStep: Number(late[0].step),
    pairs,
    key: [early[0].step, late[0].step, ...times].join(' '),
  };
}

/** Whether two rollouts have the same prompt, in the first form that both have: a chat, a text or tokens. */
export function isSamePrompt(first: Rollout, last: Rollout): boolean {
  const forms = [first, last].map(({ promptChat, promptText, promptTokenIds }) => [
    promptChat && JSON.stringify(plain(promptChat)),
    promptText,
    promptTokenIds && JSON.stringify(plain(promptTokenIds)),
  ]);
  const place = forms[0]?.findIndex((form, index) => form && forms[1]?.[index]) ?? -1;
  return place >= 0 && forms[0]?.[place] === forms[1]?.[place];
}

/** The text of a completion. Empty if only its tokens are stored. */
export const answerOf = ({ completionText, completionMessages }: Rollout): string =>
  completionText ||
  completionMessages
    .map(turnOf)
    .map(({ text }) => text)
    .join('\n');

/** The last question of a prompt. */
export function questionOf({ promptChat, promptText }: Rollout): string {
  const turns = promptChat?.messages.map(turnOf) ?? [];
  return turns.findLast(({ role }) => role === 'user')?.text ?? promptText;
}

/** The versions of a rollout as text. Empty if the versions are not known. */
export function versionsOf({ oldestVersion, newestVersion }: RolloutSummary): string {
  if (oldestVersion === undefined || newestVersion === undefined) {
    return '';
  }
  return oldestVersion === newestVersion
    ? versionName(Number(oldestVersion))
    : `versions ${oldestVersion} to ${newestVersion}`;
}

/**
 * Values of the playground's address that ask a prompt again. Undefined for prompts that the playground cannot send:
 * chats of several turns, and prompts that are stored as tokens only.
 */
export function playgroundValues(runId: string, rollout: Rollout, version: bigint | undefined): Values | undefined {
  // The most likely answers do not depend on random sampling.
  const common = { run: runId, version: version ? `${version}` : '', temperature: '0' };
  const messages = rollout.promptChat?.messages ?? [];
  if (!messages.length) {
    return rollout.promptText ? { ...common, kind: 'text', prompt: rollout.promptText } : undefined;
  }
  const texts = messages.map((message) => turnOf(message).text);
  const roles = messages.map(({ role }) => role);
  const isSystem = roles[0] === Role.SYSTEM;
  const isSingle = roles.length === (isSystem ? 2 : 1) && roles.at(-1) === Role.USER;
  return isSingle ? { ...common, prompt: texts.at(-1), system: isSystem ? texts[0] : '' } : undefined;
}
