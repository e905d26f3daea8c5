// Reading of the groups of a run, and of the rollouts of a group.
import type { GetRolloutResponse, RolloutGroupSummary } from 'twinkle-grpc/api/gateway/v1/rollout_service_pb';
import { failureOf, isAborted } from './failure';
import { groupKey, mergeGroups, type RolloutToken, tokensOf } from './rollouts';
import { rollouts } from './rpc';
import { hasScope } from './session.svelte';
import { elements } from 'twinkle-grpc';
import { TokenDecoder, vocabularyOf } from './vocabulary';

export interface GroupList {
  /** By descending step. */
  groups: RolloutGroupSummary[];
  /** Whether the run has older groups, which were not read. */
  hasOlder: boolean;
  /** Number of groups that the server removed because of the size limit. */
  removedCount: number;
}

const PAGE_SIZE = 200;
const OVERLAP_STEPS = 4;
const COMPLETE_RELOAD_MS = 60_000;

/**
 * Reads the newest groups of a run repeatedly. Each call returns all groups, but transfers only those of the newest
 * steps. All groups are read again every minute, because a program may replace older groups.
 */
export class GroupReader {
  #list: GroupList = { groups: [], hasOlder: false, removedCount: 0 };
  #limit = 0;
  #completeTime = 0;

  constructor(readonly runId: string) {}

  /** Reads at least the newest `limit` groups, or all if there are fewer. */
  async read(limit: number, signal: AbortSignal): Promise<GroupList> {
    const newest = Number(this.#list.groups[0]?.step ?? 0);
    const isComplete = limit !== this.#limit || Date.now() - this.#completeTime > COMPLETE_RELOAD_MS;
    const beginStep = isComplete ? 0 : Math.max(0, newest - OVERLAP_STEPS);
    const fresh = await this.#pages(beginStep, limit, signal);
    const isReplaced = beginStep === 0 || fresh.hasOlder;
    this.#list = isReplaced
      ? fresh
      : {
          groups: mergeGroups(this.#list.groups, fresh.groups, beginStep),
          hasOlder: this.#list.hasOlder,
          removedCount: fresh.removedCount,
        };
    if (isReplaced) {
      this.#limit = limit;
      this.#completeTime = Date.now();
    }
    return this.#list;
  }

  async #pages(beginStep: number, limit: number, signal: AbortSignal): Promise<GroupList> {
    const groups: RolloutGroupSummary[] = [];
    let pageToken = '';
    for (;;) {
      const request = { runId: this.runId, beginStep: BigInt(beginStep), pageSize: PAGE_SIZE, pageToken };
      const page = await rollouts.listRollouts(request, { signal });
      groups.push(...page.groups);
      pageToken = page.nextPageToken;
      if (!pageToken || groups.length >= limit) {
        return { groups, hasOlder: Boolean(pageToken), removedCount: Number(page.removedGroupCount) };
      }
    }
  }
}

export interface ShownRollout {
  response: GetRolloutResponse;
  /** Empty without tokens, or if the token texts are not available. */
  tokens: RolloutToken[];
}

export interface ShownGroup {
  key: string;
  /** The first rollouts of the group, by ascending index. */
  rollouts: ShownRollout[];
  /** Text of the prompt's tokens. Empty if the prompt has another form, or no tokens. */
  promptText: string;
  /** Why the token texts are not available. Empty if they are available. */
  missing: string;
}

/** Reads the rollouts of groups. Stores those of the last group, so that a later call reads only further rollouts. */
export class GroupContent {
  #key = '';
  #responses = new Map<string, GetRolloutResponse>();

  constructor(
    readonly runId: string,
    readonly baseModel: string,
  ) {}

  /** Reads the first `count` rollouts of a group. */
  async read(group: RolloutGroupSummary, count: number, signal: AbortSignal): Promise<ShownGroup> {
    const key = `${groupKey(group)}/${group.updateTime?.seconds}.${group.updateTime?.nanos}`;
    if (key !== this.#key) {
      this.#key = key;
      this.#responses = new Map();
    }
    const known = this.#responses;
    const responses = await Promise.all(
      group.rollouts.slice(0, count).map(async ({ rolloutId }) => {
        const response =
          known.get(rolloutId) ?? (await rollouts.getRollout({ runId: this.runId, rolloutId }, { signal }));
        known.set(rolloutId, response);
        return response;
      }),
    );
    const missing = await this.#loadTexts(responses, signal);
    const vocabulary = vocabularyOf(this.baseModel);
    const shown = responses.map((response) => {
      const decoder = new TokenDecoder(vocabulary);
      const tokens = missing || !response.rollout ? [] : tokensOf(response.rollout, (id) => decoder.next(id));
      return { response, tokens };
    });
    const decoder = new TokenDecoder(vocabulary);
    const promptText = missing
      ? ''
      : promptIds(responses[0])
          .map((id) => decoder.next(id).text)
          .join('');
    return { key: groupKey(group), rollouts: shown, promptText, missing };
  }

  /** Loads all token texts, and returns why they are not available. */
  async #loadTexts(responses: GetRolloutResponse[], signal: AbortSignal): Promise<string> {
    const ids = responses.flatMap(({ rollout }) => elements(rollout?.tokenIds)).concat(promptIds(responses[0]));
    if (ids.length && !hasScope('sample')) {
      return 'The key needs the scope sample to read the texts of tokens.';
    }
    try {
      await vocabularyOf(this.baseModel).load(ids, signal);
      return '';
    } catch (error) {
      if (signal.aborted || isAborted(error)) {
        throw error;
      }
      return failureOf(error).message;
    }
  }
}

/** Tokens of a prompt without a chat and without a text. Empty for other prompts. */
const promptIds = (response: GetRolloutResponse | undefined): number[] =>
  response?.rollout?.promptChat || response?.rollout?.promptText ? [] : elements(response?.rollout?.promptTokenIds);
