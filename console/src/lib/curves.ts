// Curves of metrics: merging of new points, smoothing, and alignment to one axis of steps.
import type { MetricSeries } from 'twinkle-grpc/api/gateway/v1/metric_service_pb';

export interface Curve {
  name: string;
  steps: number[];
  values: number[];
  /** Number of stored points. Larger than the number of points in this object if the server reduced the curve. */
  pointCount: number;
}

/** Names of the loss, best first: the name that the services use, and a common name in programs. */
export const LOSSES = ['train/loss', 'loss'];

export const curveOf = (series: MetricSeries): Curve => ({
  name: series.name,
  steps: series.steps.map(Number),
  values: series.values,
  pointCount: Number(series.pointCount),
});

/** Replaces the points of `curves` from `beginStep` on with the points of `fresh`. */
export function merge(curves: Curve[], fresh: Curve[], beginStep: number): Curve[] {
  const byName = new Map(curves.map((curve) => [curve.name, curve]));
  for (const tail of fresh) {
    const old = byName.get(tail.name);
    const kept = old ? lowerBound(old.steps, beginStep) : 0;
    const steps = [...(old?.steps.slice(0, kept) ?? []), ...tail.steps];
    const values = [...(old?.values.slice(0, kept) ?? []), ...tail.values];
    const dropped = (old?.steps.length ?? 0) - kept;
    byName.set(tail.name, {
      name: tail.name,
      steps,
      values,
      pointCount: (old?.pointCount ?? 0) - dropped + tail.pointCount,
    });
  }
  return [...byName.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
}

/** Adds the points of `fresh` to `curves`. A point replaces the one with the same step. */
export function insert(curves: Curve[], fresh: Curve[]): Curve[] {
  const byName = new Map(curves.map((curve) => [curve.name, curve]));
  for (const added of fresh) {
    const old = byName.get(added.name);
    byName.set(added.name, old ? inserted(old, added) : added);
  }
  return [...byName.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
}

function inserted(old: Curve, added: Curve): Curve {
  const begin = lowerBound(old.steps, added.steps[0] ?? Infinity);
  // New steps usually follow all existing ones, so only the end of the curve is sorted.
  const points = new Map(old.steps.slice(begin).map((step, index) => [step, old.values[begin + index] ?? NaN]));
  const kept = points.size;
  added.steps.forEach((step, index) => points.set(step, added.values[index] ?? NaN));
  const sorted = [...points].sort(([a], [b]) => a - b);
  return {
    name: old.name,
    steps: [...old.steps.slice(0, begin), ...sorted.map(([step]) => step)],
    values: [...old.values.slice(0, begin), ...sorted.map(([, value]) => value)],
    pointCount: old.pointCount + points.size - kept,
  };
}

/** Index of the first element that is at least `value` in an ascending list. */
export function lowerBound(sorted: number[], value: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((sorted[middle] ?? Infinity) < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/** Bias-corrected exponential moving average. `weight` is the weight of earlier values, in [0, 1). */
export function smooth(values: number[], weight: number): number[] {
  let [average, norm] = [0, 0];
  return values.map((value) => {
    if (!Number.isFinite(value)) {
      return value;
    }
    average = weight * average + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return average / norm;
  });
}

/** All steps of the curves, and the values of each curve at these steps: null where a curve cannot be drawn. */
export function align(curves: { steps: number[]; values: number[] }[], isLog: boolean): (number | null)[][] {
  const [first] = curves;
  const isCommon = curves.every((curve) => curve.steps === first?.steps);
  const steps = isCommon ? (first?.steps ?? []) : union(curves);
  const rows = curves.map(({ steps: own, values }) => {
    // `undefined` continues a line over a step that the curve lacks; `null` interrupts it.
    const row: (number | null | undefined)[] = new Array<undefined>(steps.length).fill(undefined);
    let index = 0;
    own.forEach((step, position) => {
      while ((steps[index] ?? step) < step) {
        index += 1;
      }
      const value = values[position] ?? NaN;
      row[index] = Number.isFinite(value) && (!isLog || value > 0) ? value : null;
    });
    return row as (number | null)[];
  });
  return [steps, ...rows];
}

const union = (curves: { steps: number[] }[]): number[] =>
  [...new Set(curves.flatMap((curve) => curve.steps))].sort((a, b) => a - b);
