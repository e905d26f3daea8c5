// The range of the values of a chart.

const RESOLUTION = 1e-4;

/**
 * The range, widened if its ends are almost equal, such as those of a policy's ratio, which is 1 except for rounding
 * errors. uPlot 1.6.32 rounds numbers with six nines or zeros in a row, so it makes such a range empty, and does not end
 * its search for ticks.
 */
export function widened(min: number, max: number): [number, number] {
  const size = Math.max(Math.abs(min), Math.abs(max));
  const [middle, least] = [(min + max) / 2, size * RESOLUTION];
  return size && max - min < least ? [middle - least / 2, middle + least / 2] : [min, max];
}
