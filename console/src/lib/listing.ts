// Reading of runs and of their curves.
import type { Run } from 'twinkle-grpc/api/gateway/v1/catalogue_service_pb';
import { type Curve, curveOf, merge } from './curves';
import { catalogue, metrics } from './rpc';
import { labelsOf, matches, type RunFilter } from './runs';

export interface RunPage {
  runs: Run[];
  nextPageToken: string;
  /** Number of runs in which the text was searched. 0 without a text. */
  searchedCount: number;
}

const PAGE_SIZE = 50;
const SEARCHED_RUNS = 1000;

/** Lists a page of runs. The server cannot search for text, so the newest matching runs are searched here. */
export async function listRuns(filter: RunFilter, pageToken: string, signal: AbortSignal): Promise<RunPage> {
  const text = filter.text.trim().toLowerCase();
  const request = {
    pageSize: text ? SEARCHED_RUNS : PAGE_SIZE,
    pageToken: text ? '' : pageToken,
    baseModel: filter.baseModel,
    userMetadata: labelsOf(filter.tags),
    isActive: filter.state === '' ? undefined : filter.state === 'active',
  };
  const { runs, nextPageToken } = await catalogue.listRuns(request, { signal });
  if (!text) {
    return { runs, nextPageToken, searchedCount: 0 };
  }
  return { runs: runs.filter((run) => matches(run, text)), nextPageToken, searchedCount: runs.length };
}

/** Maximum number of points of each metric in a response. */
export const MAX_POINTS = 10_000;

/** Reads the curves of a run in a range of steps. */
export async function readRange(
  runId: string,
  range: { min: number; max: number },
  signal: AbortSignal,
): Promise<Curve[]> {
  const request = {
    runId,
    maxPoints: MAX_POINTS,
    beginStep: BigInt(Math.max(0, Math.floor(range.min))),
    endStep: BigInt(Math.ceil(range.max) + 1),
  };
  const { series } = await metrics.getMetrics(request, { signal });
  return series.map(curveOf);
}

const OVERLAP_STEPS = 200;
const COMPLETE_RELOAD_MS = 60_000;

/**
 * Reads the curves of a run repeatedly. Each call returns all points, but transfers only new ones: those after the
 * newest step, and some before it, because metrics of one step may be logged at different times. All points are read
 * again every minute, because a program may replace older values.
 */
export class CurveReader {
  #curves: Curve[] = [];
  #completeTime = 0;

  constructor(readonly runId: string) {}

  async read(signal: AbortSignal): Promise<Curve[]> {
    const isComplete = Date.now() - this.#completeTime > COMPLETE_RELOAD_MS;
    const newest = Math.max(0, ...this.#curves.map((curve) => curve.steps.at(-1) ?? 0));
    const beginStep = isComplete ? 0 : Math.max(0, newest - OVERLAP_STEPS);
    const request = { runId: this.runId, maxPoints: MAX_POINTS, beginStep: BigInt(beginStep) };
    const { series } = await metrics.getMetrics(request, { signal });
    if (isComplete) {
      this.#completeTime = Date.now();
      this.#curves = [];
    }
    this.#curves = merge(this.#curves, series.map(curveOf), beginStep);
    return this.#curves;
  }
}
