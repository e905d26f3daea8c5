// The newest results of a run's operations, followed live.
import { type Failure, failureOf, hasReason, isAborted } from './failure';
import { type OperationRow, rowOf } from './receipts';
import { training } from './rpc';

const KEPT = 500;
const RECONNECT_MS = 2000;
const FLUSH_MS = 100;

export class OperationLog {
  /** Ascending by number. */
  rows = $state.raw<OperationRow[]>([]);
  failure = $state.raw<Failure>();
  isConnected = $state(false);
  #pending: OperationRow[] = [];
  #timer: ReturnType<typeof setTimeout> | undefined;

  /**
   * Follows the results until `signal` aborts, or until the result with the number `end` was read.
   *
   * @param lastNumber number of the last executed operation.
   */
  async follow(runId: string, lastNumber: number, end: number, signal: AbortSignal): Promise<void> {
    this.#flush();
    let after = Math.max(0, lastNumber - KEPT);
    while (!signal.aborted && (this.rows.at(-1)?.number ?? after) < end) {
      try {
        await this.#read(runId, this.rows.at(-1)?.number ?? after, end, signal);
      } catch (error) {
        if (signal.aborted || isAborted(error)) {
          this.isConnected = false;
          return;
        }
        if (hasReason(error, 'OPERATION_NOT_FOUND') && after < lastNumber && !this.rows.length) {
          // Older results were deleted: try half of the distance to the newest result.
          after = lastNumber - Math.floor((lastNumber - after) / 2);
          continue;
        }
        this.failure = failureOf(error);
      }
      this.isConnected = false;
      this.#flush();
      if ((this.rows.at(-1)?.number ?? 0) >= end) {
        return;
      }
      await new Promise((resume) => setTimeout(resume, RECONNECT_MS));
    }
  }

  async #read(runId: string, after: number, end: number, signal: AbortSignal): Promise<void> {
    const request = { adapterId: runId, afterSequenceNumber: BigInt(after) };
    const control = new AbortController();
    const ended = AbortSignal.any([signal, control.signal]);
    this.isConnected = true;
    for await (const { result } of training.watchOperations(request, { signal: ended })) {
      this.failure = undefined;
      if (result) {
        const row = rowOf(result);
        this.#pending.push(row);
        this.#timer ??= setTimeout(() => this.#flush(), FLUSH_MS);
        if (row.number >= end) {
          control.abort();
          return;
        }
      }
    }
  }

  /** Shows all results that have arrived together, because recorded results arrive in a burst. */
  #flush(): void {
    this.rows = [...this.rows, ...this.#pending].slice(-KEPT);
    this.#pending = [];
    this.#timer = undefined;
  }
}
