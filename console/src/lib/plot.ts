// Options of uPlot: colours of the theme, axes, and the selection of a range.
import uPlot from 'uplot';
import { decimal } from './format';
import { colour } from './theme.svelte';
import { widened } from './yrange';

/** Range of steps that is shown. `null` shows all steps. */
export type Range = { min: number; max: number } | null;

export interface Line {
  label: string;
  /** Number of the colour, from 0. */
  slot: number;
  steps: number[];
  values: number[];
}

export const SLOTS = 8;

interface PlotSettings {
  lines: Line[];
  hasRaw: boolean;
  isLog: boolean;
  syncKey: string;
  width: number;
  height: number;
  onhover: (step: number | null) => void;
  onrange: (range: Range) => void;
}

const AXIS_FONT = '11px system-ui, sans-serif';

export function plotOptions(settings: PlotSettings): uPlot.Options {
  const muted = colour('--muted');
  const axis: uPlot.Axis = {
    stroke: muted,
    font: AXIS_FONT,
    grid: { stroke: colour('--line'), width: 1 },
    ticks: { show: false },
    gap: 4,
  };
  return {
    width: settings.width,
    height: settings.height,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    scales: { x: { time: false }, y: settings.isLog ? { distr: 3 } : { distr: 1, range: valueRange } },
    axes: [
      { ...axis, size: 28, incrs: INTEGER_STEPS, values: (_plot, ticks) => ticks.map(shortNumber) },
      {
        ...axis,
        size: 56,
        ...(isInteger(settings.lines) ? { incrs: INTEGER_STEPS } : {}),
        values: (_plot, ticks) => ticks.map((tick) => (tick === null ? '' : decimal(tick))),
      },
    ],
    series: [{}, ...settings.lines.flatMap((line) => seriesOf(line, settings.hasRaw))],
    cursor: cursorOf(settings),
    hooks: {
      setCursor: [(plot) => settings.onhover(plot.cursor.idx == null ? null : (plot.data[0][plot.cursor.idx] ?? null))],
      setSelect: [(plot) => selectRange(plot, settings.onrange)],
    },
  };
}

/** The range of the values with a margin. Without values, both ends are null. */
const valueRange = (_plot: uPlot, min: number | null, max: number | null): uPlot.Range.MinMax =>
  min === null || max === null ? [null, null] : uPlot.rangeNum(...widened(min, max), 0.1, true);

const INTEGER_STEPS = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();

const isInteger = (lines: Line[]): boolean => lines.every((line) => line.values.every(Number.isInteger));

const shortNumber = (value: number): string =>
  new Intl.NumberFormat('en', { notation: 'compact', maximumFractionDigits: 2 }).format(value);

/** The series of a line: the smoothed values, and the raw values in a lighter colour. */
function seriesOf(line: Line, hasRaw: boolean): uPlot.Series[] {
  const stroke = colour(`--series-${line.slot % SLOTS}`);
  const points = { show: (_plot: uPlot, _series: number, begin: number, end: number) => begin === end };
  const drawn: uPlot.Series = { label: line.label, stroke, width: 1.5, points, spanGaps: false };
  return hasRaw ? [{ ...drawn, alpha: 0.3, width: 1 }, drawn] : [drawn];
}

function cursorOf({ syncKey, onrange }: PlotSettings): uPlot.Cursor {
  return {
    y: false,
    points: { size: 6 },
    drag: { x: true, y: false, setScale: false },
    // Charts share the cursor. The page passes the selected range to all charts.
    sync: { key: syncKey, filters: { pub: (type) => type === 'mousemove' || type === 'mouseleave' } },
    bind: { dblclick: () => () => (onrange(null), null) },
  };
}

function selectRange(plot: uPlot, onrange: (range: Range) => void): void {
  const { left, width } = plot.select;
  if (width > 0) {
    onrange({ min: plot.posToVal(left, 'x'), max: plot.posToVal(left + width, 'x') });
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }
}
