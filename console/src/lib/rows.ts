// Rows of a dataset, exported as JSON lines.

export type Row = Record<string, unknown>;

/** Complete lines at the start of a text, at most `count`. `isEnd` tells whether the text ends with its last line. */
export function firstLines(text: string, count: number, isEnd: boolean): string[] {
  const lines = text.split('\n');
  const complete = isEnd ? lines : lines.slice(0, -1);
  return complete.filter((line) => line.trim()).slice(0, count);
}

const IGNORED_LABEL = -100;

const numbers = (value: unknown): number[] | undefined =>
  Array.isArray(value) && value.every((item) => typeof item === 'number') ? (value as number[]) : undefined;

export interface EncodedRow {
  ids: number[];
  /** Whether the loss counts the prediction of each token. */
  isTrained: boolean[];
}

/** The tokens of an encoded row. `undefined` if the row is not encoded. */
export function encodedRow(row: Row): EncodedRow | undefined {
  const ids = numbers(row['input_ids']);
  if (!ids) {
    return undefined;
  }
  // Labels are shifted: the label at a position is the token that follows it.
  const labels = numbers(row['labels']) ?? [];
  const isTrained = ids.map((_, index) => index > 0 && (labels[index - 1] ?? IGNORED_LABEL) !== IGNORED_LABEL);
  return { ids, isTrained };
}
