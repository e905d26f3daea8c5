// Periods of usage, which is recorded per hour.
import { timestampFromMs, type Timestamp } from '@bufbuild/protobuf/wkt';

export const PERIODS = { day: 'last 24 hours', week: 'last 7 days', month: 'last 30 days', all: 'all time' } as const;
export type Period = keyof typeof PERIODS;

const HOURS: Record<Period, number> = { day: 24, week: 24 * 7, month: 24 * 30, all: 0 };

/** Start of a period that ends now. Unset for all time. */
export function beginOf(period: Period, now = Date.now()): Timestamp | undefined {
  return HOURS[period] ? timestampFromMs(now - HOURS[period] * 3_600_000) : undefined;
}
