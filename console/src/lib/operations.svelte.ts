// Results of a run's operations, without their tensors, and what their receipts say about queueing and sharing.
import type { OperationResult } from '../gen/twinkle/api/model/v1/operation_result_pb';
import { type Failure, failureOf, hasReason, isAborted } from './failure';
import { decimal, seconds } from './format';
import { training } from './rpc';

export interface OperationRow {
  number: number;
  /** Kind of the result, because a result does not name its verb: "forward", "step", "save" and others. */
  kind: string;
  detail: string;
  error: string;
  warnings: string[];
  tokenCount: number;
  paddingTokenCount: number;
  sharedTokenCount: number;
  queueSeconds: number;
  deviceSeconds: number;
  passCount: number;
  /** Largest number of adapters that shared a pass with the operation, including this one. */
  passAdapterCount: number;
}

export function rowOf({ sequenceNumber, outcome, receipt, warnings }: OperationResult): OperationRow {
  return {
    number: Number(sequenceNumber),
    kind: outcome.case ?? 'done',
    detail: detailOf(outcome),
    error: outcome.case === 'error' ? outcome.value.message : '',
    warnings,
    tokenCount: Number(receipt?.tokenCount ?? 0),
    paddingTokenCount: Number(receipt?.paddingTokenCount ?? 0),
    sharedTokenCount: Number(receipt?.sharedTokenCount ?? 0),
    queueSeconds: seconds(receipt?.queueTime),
    deviceSeconds: seconds(receipt?.deviceTime),
    passCount: receipt?.passCount ?? 0,
    passAdapterCount: receipt?.passAdapterCount ?? 0,
  };
}

function detailOf(outcome: OperationResult['outcome']): string {
  switch (outcome.case) {
    case 'forward':
      return `loss ${decimal(outcome.value.loss)} over ${outcome.value.labelCount} labels`;
    case 'step': {
      const { gradNorm, learningRate, stepCount, isApplied } = outcome.value;
      const norm = gradNorm === undefined ? '' : `gradient norm ${decimal(gradNorm)}, `;
      return `${norm}rate ${decimal(learningRate)}, ${isApplied ? 'step' : 'accumulated for step'} ${stepCount}`;
    }
    case 'publish':
      return `version ${outcome.value.version}`;
    case 'save':
      return outcome.value.checkpointPath;
    default:
      return '';
  }
}

export interface Sharing {
  operationCount: number;
  /** Share of the operations with passes for which a pass included other adapters. */
  coBatched: number;
  /** Share of queueing in the time of the operations. */
  queued: number;
  queueSeconds: number;
  deviceSeconds: number;
}

/** Summary of the operations that ran passes. `undefined` if there are none. */
export function sharingOf(rows: OperationRow[]): Sharing | undefined {
  const passed = rows.filter((row) => row.passCount > 0);
  if (!passed.length) {
    return undefined;
  }
  const sum = (value: (row: OperationRow) => number): number => passed.reduce((total, row) => total + value(row), 0);
  const [queueSeconds, deviceSeconds] = [sum((row) => row.queueSeconds), sum((row) => row.deviceSeconds)];
  return {
    operationCount: passed.length,
    coBatched: sum((row) => Number(row.passAdapterCount > 1)) / passed.length,
    queued: queueSeconds / (queueSeconds + deviceSeconds || 1),
    queueSeconds,
    deviceSeconds,
  };
}

const KEPT = 500;
const RECONNECT_MS = 2000;

/** The newest results of a run, followed live. */
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
