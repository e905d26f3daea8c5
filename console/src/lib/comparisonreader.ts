// Reading of the rollouts that a run's first and last step have in common.
import type { Rollout } from 'twinkle-grpc/api/gateway/v1/rollout_service_pb';
import { type Comparison, comparisonOf, EVALUATION, isSamePrompt, type Pair } from './comparison';
import { rollouts } from './rpc';

const MAX_GROUPS = 50;

/** Finds the rollouts to compare. The comparison has no pairs if no prompt occurs at both steps. */
export async function readComparison(runId: string, signal: AbortSignal): Promise<Comparison> {
  const list = async (groupId: string, pageSize: number): Promise<Comparison> => {
    const [oldest, newest] = await Promise.all(
      [true, false].map((isAscending) => rollouts.listRollouts({ runId, groupId, pageSize, isAscending }, { signal })),
    );
    return comparisonOf(oldest?.groups ?? [], newest?.groups ?? []);
  };
  const evaluation = await list(EVALUATION, 1);
  return evaluation.pairs.length ? evaluation : list('', MAX_GROUPS);
}

/** The two complete rollouts of a prompt. */
export interface ShownPair extends Pair {
  first: Rollout;
  last: Rollout;
}

/** Reads the rollouts of pairs. Omits pairs if only the beginnings of their prompts are equal. */
export async function readPairs(runId: string, pairs: Pair[], signal: AbortSignal): Promise<ShownPair[]> {
  const read = async (rolloutId: string): Promise<Rollout | undefined> =>
    (await rollouts.getRollout({ runId, rolloutId }, { signal })).rollout;
  const found = await Promise.all(
    pairs.map(async (pair) => {
      const [first, last] = await Promise.all([read(pair.before.rolloutId), read(pair.after.rolloutId)]);
      return first && last && isSamePrompt(first, last) ? [{ ...pair, first, last }] : [];
    }),
  );
  return found.flat();
}
