// Formatting of numbers, sizes and times.
import type { Duration, Timestamp } from '@bufbuild/protobuf/wkt';

const grouped = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });

export const count = (value: number | bigint): string => grouped.format(value);

/** A number with the given significant digits. Large and small values have an exponent. */
export function decimal(value: number, digits = 4): string {
  if (!Number.isFinite(value)) {
    return Number.isNaN(value) ? 'NaN' : value > 0 ? '∞' : '−∞';
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value
      .toExponential(Math.min(digits - 1, 2))
      .replace('e+', 'e')
      .replaceAll('-', '−');
  }
  return `${Number(value.toPrecision(digits))}`.replace('-', '−');
}

/** A share as a percentage, with a digit after the point where rounding would hide a difference from 0 or 1. */
export function percent(share: number): string {
  if (share > 0 && share < 0.0005) {
    return '< 0.1 %';
  }
  const isNearEnd = (share > 0 && share < 0.1) || (share > 0.99 && share < 0.9995);
  return `${(100 * share).toFixed(isNearEnd ? 1 : 0)} %`;
}

export function bytes(value: number | bigint): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let size = Number(value);
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit += 1;
  }
  return `${unit === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${units[unit]}`;
}

export const seconds = (duration: Duration | undefined): number =>
  duration ? Number(duration.seconds) + duration.nanos / 1e9 : 0;

export function span(value: number): string {
  if (value < 1) {
    return `${Math.round(value * 1000)} ms`;
  }
  if (value < 60) {
    return `${Number(value.toFixed(value < 10 ? 1 : 0))} s`;
  }
  if (value < 3600) {
    return `${Math.floor(value / 60)} min`;
  }
  return value < 172_800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86_400)} d`;
}

export const date = (time: Timestamp): Date => new Date(Number(time.seconds) * 1000 + time.nanos / 1e6);

/** Time since `time`, such as "5 min ago". */
export function age(time: Timestamp, now = Date.now()): string {
  const elapsed = Math.floor((now - date(time).getTime()) / 1000);
  return elapsed < 1 ? 'now' : `${span(elapsed)} ago`;
}

export const moment = (time: Date): string => time.toISOString().replace('T', ' ').slice(0, 19) + ' UTC';

/** Name of an enum value without the prefix of its enum: "DRAINING" of REPLICA_STATE_DRAINING becomes "draining". */
export const lower = (name: string | undefined): string => (name ?? 'unknown').toLowerCase().replaceAll('_', ' ');
