// Pushes of checkpoints to hubs and folders.
import { type Export, ExportState } from 'twinkle-grpc/api/gateway/v1/export_service_pb';

export type Tone = 'good' | 'warn' | 'bad' | 'quiet';

const TONES: Partial<Record<ExportState, Tone>> = {
  [ExportState.RUNNING]: 'good',
  [ExportState.DONE]: 'good',
  [ExportState.FAILED]: 'bad',
};

export const isFinished = ({ state }: Export): boolean =>
  [ExportState.DONE, ExportState.FAILED, ExportState.CANCELLED].includes(state);

/** Colour of the state. An unfinished push with a failure waits for its next attempt. */
export const toneOf = (push: Export): Tone =>
  push.failure && !isFinished(push) ? 'warn' : (TONES[push.state] ?? 'quiet');

/** The part of the archive that the current attempt has read, 0 to 1. NaN while the size of the archive is not known. */
export const progressOf = ({ readBytes, sizeBytes }: Export): number =>
  sizeBytes ? Number(readBytes) / Number(sizeBytes) : NaN;

/** Address of the pushed files, if a browser can open it. */
export const linkOf = ({ url }: Export): string => (url.startsWith('https://') ? url : '');

/** An id by which the server recognizes a repeated request. `crypto.randomUUID` needs TLS. */
export const newRequestId = (): string =>
  Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, '0')).join('');

/** Whether a target needs a token of the hub. */
export const needsToken = (target: string): boolean => !target.trim().startsWith('file://');
