// Queueing and sharing of passes, from the results of operations and their receipts, without the tensors.
import type { OperationResult } from 'twinkle-grpc/api/model/v1/operation_result_pb';
import { decimal, seconds } from './format';

export interface OperationRow {
  number: number;
  /** Kind of the result, such as "forward", "step" or "save", because a result does not name its verb. */
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
  /** Fraction of the operations with passes that shared a pass with other adapters. */
  coBatched: number;
  /** Fraction of the time of the operations that is queueing. */
  queued: number;
  queueSeconds: number;
  deviceSeconds: number;
}

/** Summary of the operations that ran passes. `undefined` without such operations. */
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
