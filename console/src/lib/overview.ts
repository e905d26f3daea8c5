// Reading of the newest runs, of their loss, and of the operations that they wait for.
import type { Run } from 'twinkle-grpc/api/gateway/v1/catalogue_service_pb';
import type { GetOperationResponse } from 'twinkle-grpc/api/model/v1/training_service_pb';
import { type Curve, curveOf, LOSSES } from './curves';
import { date } from './format';
import { adapters, catalogue, fleet, metrics, sampler } from './rpc';
import { type Load, loadOf, type Samplers, samplersOf } from './load';
import { readNext } from './run.svelte';
import { hasScope } from './session.svelte';

export interface RunCard {
  run: Run;
  /** Unset if no loss was logged. */
  loss: Curve | undefined;
}

/** The next operation of a run, with its sequence number. */
export interface Waiting {
  number: bigint;
  next: GetOperationResponse;
}

export interface NewestRuns {
  cards: RunCard[];
  /** Number of listed runs, and number of listed runs that can be trained. */
  runCount: number;
  activeCount: number;
  /** Whether there are more runs than the counted ones. */
  isPartial: boolean;
  /** Active runs that changed last, whose operations can be followed. */
  changedIds: string[];
}

const COUNTED_RUNS = 100;
const SHOWN_RUNS = 6;
const FOLLOWED_RUNS = 8;
const SPARK_POINTS = 60;
const PAGE_SIZE = 1000;

export async function readNewestRuns(signal: AbortSignal): Promise<NewestRuns> {
  const { runs, nextPageToken } = await catalogue.listRuns({ pageSize: COUNTED_RUNS }, { signal });
  const active = runs.filter(({ isActive }) => isActive);
  return {
    cards: await Promise.all(
      runs.slice(0, SHOWN_RUNS).map(async (run) => ({ run, loss: await readLoss(run.runId, signal) })),
    ),
    runCount: runs.length,
    activeCount: active.length,
    isPartial: nextPageToken !== '',
    changedIds: newestChanges(active)
      .slice(0, FOLLOWED_RUNS)
      .map(({ runId }) => runId),
  };
}

const newestChanges = (runs: Run[]): Run[] => {
  const time = ({ updateTime }: Run): number => (updateTime ? date(updateTime).getTime() : 0);
  return [...runs].sort((a, b) => time(b) - time(a));
};

async function readLoss(runId: string, signal: AbortSignal): Promise<Curve | undefined> {
  const { series } = await metrics.getMetrics({ runId, names: LOSSES, maxPoints: SPARK_POINTS }, { signal });
  return series.map(curveOf).sort((a, b) => LOSSES.indexOf(a.name) - LOSSES.indexOf(b.name))[0];
}

/** Reads the running or queued operations of runs. Empty if the key may not read operations. */
export async function readWaiting(runIds: string[], signal: AbortSignal): Promise<Map<string, Waiting>> {
  if (!hasScope('train') || !runIds.length) {
    return new Map();
  }
  const { adapters: listed } = await adapters.listAdapters({ pageSize: PAGE_SIZE }, { signal });
  const found = await Promise.all(
    listed
      .filter(({ adapterId }) => runIds.includes(adapterId))
      .map(async (adapter): Promise<[string, Waiting][]> => {
        const next = await readNext(adapter, signal);
        return next ? [[adapter.adapterId, { number: adapter.sequenceNumber + 1n, next }]] : [];
      }),
  );
  return new Map(found.flat());
}

/** Reads the load of the samplers, with their number for operators. Undefined if the key may not read the load. */
export async function readLoad(signal: AbortSignal): Promise<Samplers | Load | undefined> {
  if (hasScope('operator')) {
    return samplersOf((await fleet.listReplicas({ pageSize: PAGE_SIZE }, { signal })).replicas);
  }
  if (hasScope('sample')) {
    const { load } = await sampler.getLoad({}, { signal });
    return loadOf(load ? [load] : []);
  }
  return undefined;
}
