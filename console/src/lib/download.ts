// Files that the browser downloads.
import { checkpoints } from './rpc';

export function download(name: string, text: string): void {
  const address = URL.createObjectURL(new Blob([text], { type: 'application/json' }));
  Object.assign(document.createElement('a'), { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}

/**
 * Starts the download of a checkpoint, which the browser writes to disk while it arrives. The checkpoint is read first,
 * because the page gets no notice of an error of the download itself.
 */
export async function downloadCheckpoint(path: string): Promise<void> {
  const { checkpoint } = await checkpoints.getCheckpoint({ checkpointPath: path });
  const names = [checkpoint?.adapterId, checkpoint?.name].map((name) => encodeURIComponent(name ?? ''));
  const address = `/console/api/checkpoints/${names.join('/')}`;
  Object.assign(document.createElement('a'), { href: address, download: '' }).click();
}
