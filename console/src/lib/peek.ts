// Reading of the first rows of a dataset.
import { type Row, rowOf } from './rows';
import { datasets } from './rpc';

const PAGE_ROWS = 20;

/** Reads the rows of a dataset in pages, which are kept, so that more rows can be read. */
export class RowReader {
  #rows: Row[] = [];

  constructor(readonly datasetId: string) {}

  /** Reads the first `count` rows, or all of a shorter dataset. */
  async read(count: number, signal: AbortSignal): Promise<Row[]> {
    while (this.#rows.length < count) {
      const request = { datasetId: this.datasetId, beginRow: BigInt(this.#rows.length), rowCount: PAGE_ROWS };
      const { rows } = await datasets.peekRows(request, { signal });
      if (!rows.length) {
        break;
      }
      this.#rows = [...this.#rows, ...rows.map(rowOf)];
    }
    return this.#rows.slice(0, count);
  }
}
