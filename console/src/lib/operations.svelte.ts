// The newest results of a run's operations, followed live.
import { type Failure, failureOf, hasReason, isAborted } from './failure';
import { type OperationRow, rowOf } from './receipts';
import { training } from './rpc';

const KEPT = 500;
const RECONNECT_MS = 2000;

export class OperationLog {
  /** Ascending by number. */
  rows = $state.raw<OperationRow[]>([]);
  failure = $state.raw<Failure>();
  isConnected = $state(false);

  /** Follows the results until `signal` aborts. `lastNumber` is the number of the last executed operation. */
  async follow(runId: string, lastNumber: number, signal: AbortSignal): Promise<void> {
    let after = Math.max(0, lastNumber - KEPT);
    while (!signal.aborted) {
      try {
        await this.#read(runId, this.rows.at(-1)?.number ?? after, signal);
      } catch (error) {
        if (signal.aborted || isAborted(error)) {
          return;
        }
        if (hasReason(error, 'OPERATION_NOT_FOUND') && after < lastNumber && !this.rows.length) {
          // Older results were deleted: try half of the distance to the newest one.
          after = lastNumber - Math.floor((lastNumber - after) / 2);
          continue;
        }
        this.failure = failureOf(error);
      }
      this.isConnected = false;
      await new Promise((resume) => setTimeout(resume, RECONNECT_MS));
    }
  }

  async #read(runId: string, after: number, signal: AbortSignal): Promise<void> {
    const request = { adapterId: runId, afterSequenceNumber: BigInt(after) };
    for await (const { result } of training.watchOperations(request, { signal })) {
      this.isConnected = true;
      this.failure = undefined;
      if (result) {
        this.rows = [...this.rows, rowOf(result)].slice(-KEPT);
      }
    }
  }
}
