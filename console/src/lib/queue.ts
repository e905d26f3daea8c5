// Text for the status of the next operation of a run.
import { type GetOperationResponse, OperationState } from 'twinkle-grpc/api/model/v1/training_service_pb';
import { count, seconds, span } from './format';

/** The state of an operation that runs or is queued, in words. `number` is its sequence number. */
export function queueText(next: GetOperationResponse, number: bigint): string {
  if (next.state === OperationState.RUNNING) {
    return `operation ${number} is running`;
  }
  const wait = next.estimatedWait ? `, about ${span(seconds(next.estimatedWait))}` : '';
  return `${count(next.queuePosition)} ahead in the queue${wait}`;
}
