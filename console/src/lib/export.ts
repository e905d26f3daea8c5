// Reading of the first rows of a dataset, which the data service exports as JSON lines.
import { FileFormat } from '../gen/twinkle/api/data/v1/dataset_pb';
import { firstLines, type Row } from './rows';
import { datasets } from './rpc';

const MAX_BYTES = 8 * 1024 * 1024;

/** Reads the first rows, and cancels the export as soon as they are complete. */
export async function readRows(datasetId: string, rowCount: number, signal: AbortSignal): Promise<Row[]> {
  const decoder = new TextDecoder();
  let [text, size, isEnd] = ['', 0, true];
  const control = new AbortController();
  const request = { datasetId, format: FileFormat.JSONL };
  for await (const { chunk } of datasets.exportDataset(request, {
    signal: AbortSignal.any([signal, control.signal]),
  })) {
    text += decoder.decode(chunk?.data, { stream: true });
    size += chunk?.data.length ?? 0;
    if (size > MAX_BYTES || firstLines(text, rowCount, false).length === rowCount) {
      isEnd = false;
      break;
    }
  }
  control.abort();
  return firstLines(text, rowCount, isEnd).map((line) => JSON.parse(line) as Row);
}
