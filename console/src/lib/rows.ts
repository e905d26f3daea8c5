// Rows of a dataset, as the data service shows them.
import type { PeekedRow } from 'twinkle-grpc/api/data/v1/dataset_service_pb';
import { elements } from 'twinkle-grpc';

export interface EncodedRow {
  ids: number[];
  /** Whether the loss counts the prediction of each token. */
  isTrained: boolean[];
}

export interface Row {
  index: number;
  /** Columns without the tokens. */
  columns: Record<string, unknown>;
  /** Undefined if the dataset is not encoded. */
  encoded: EncodedRow | undefined;
  /** Why the row cannot be shown. Empty if the row can be shown. */
  problem: string;
}

const IGNORED_LABEL = -100;

export function rowOf({ index, columns, feature, problem }: PeekedRow): Row {
  const ids = elements(feature?.inputIds);
  // Labels are shifted: the label at a position is the token that follows it.
  const labels = elements(feature?.labels);
  const isTrained = ids.map((_, place) => place > 0 && (labels[place - 1] ?? IGNORED_LABEL) !== IGNORED_LABEL);
  return {
    index: Number(index),
    columns: columns ?? {},
    encoded: feature && { ids, isTrained },
    problem,
  };
}
