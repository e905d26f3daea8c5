// The data of a run that several sections of its page show.
import { untrack } from 'svelte';
import type { Adapter } from 'twinkle-grpc/api/model/v1/adapter_pb';
import { type GetOperationResponse, OperationState } from 'twinkle-grpc/api/model/v1/training_service_pb';
import type { ResidentAdapter } from 'twinkle-grpc/api/sampler/v1/engine_pb';
import { RunCurves } from './curveFeed.svelte';
import { hasReason } from './failure';
import { OperationLog } from './operations.svelte';
import { Query } from './query.svelte';
import { adapters, sampler, training } from './rpc';
import { hasScope } from './session.svelte';
import { visibility } from './visibility.svelte';

export interface AdapterState {
  /** Unset if the run has ended, or the key may not read adapters. */
  adapter: Adapter | undefined;
  /** The next operation after the last executed one. Unset without such an operation. */
  next: GetOperationResponse | undefined;
  /** Whether operations ran in the last seconds. */
  isBusy: boolean;
}

const PAGE_SIZE = 1000;
const BUSY_MS = 10_000;

/** Tells whether a program trains the run, even if the program waits between two operations. */
class Activity {
  #number: bigint | undefined;
  #changeTime = -Infinity;

  observe(state: Omit<AdapterState, 'isBusy'>): AdapterState {
    const number = state.adapter?.sequenceNumber;
    if (state.next || (this.#number !== undefined && number !== this.#number)) {
      this.#changeTime = Date.now();
    }
    this.#number = number;
    return { ...state, isBusy: Date.now() - this.#changeTime < BUSY_MS };
  }
}

export class RunData {
  readonly curves: RunCurves;
  readonly adapter: Query<AdapterState>;
  readonly residents: Query<ResidentAdapter[]>;
  readonly log = new OperationLog();
  #firstNumber = $state<number>();

  /**
   * Starts loading. Must be called while a component is initialized.
   *
   * @param section returns the shown section of the page. The section selects the only open stream of the page:
   * browsers limit the connections to a server.
   */
  constructor(
    readonly runId: string,
    section: () => string,
  ) {
    const activity = new Activity();
    const isLogShown = $derived(section() === 'operations');
    this.curves = new RunCurves(runId, () => !isLogShown);
    this.adapter = new Query(async (signal) => activity.observe(await readAdapter(runId, signal)), 2000);
    this.residents = new Query((signal) => readResidents(runId, signal), 5000);
    const lastNumber = $derived(Number(this.adapter.data?.adapter?.sequenceNumber ?? 0));
    $effect(() => {
      const number = this.adapter.data?.adapter?.sequenceNumber;
      this.#firstNumber ??= number === undefined ? undefined : Number(number);
    });
    $effect(() => {
      if (this.#firstNumber !== undefined && visibility.isVisible) {
        const control = new AbortController();
        const firstNumber = this.#firstNumber;
        // While the log is not shown, it is read up to the last executed operation, without an open stream.
        const end = isLogShown ? Infinity : lastNumber;
        // The log changes while it is followed, and must not start this effect again.
        untrack(() => void this.log.follow(runId, firstNumber, end, control.signal));
        return () => control.abort();
      }
      return undefined;
    });
  }
}

async function readAdapter(runId: string, signal: AbortSignal): Promise<Omit<AdapterState, 'isBusy'>> {
  if (!hasScope('train')) {
    return { adapter: undefined, next: undefined };
  }
  try {
    const { adapter } = await adapters.getAdapter({ adapterId: runId }, { signal });
    return { adapter, next: adapter && (await readNext(adapter, signal)) };
  } catch (error) {
    if (hasReason(error, 'ADAPTER_NOT_FOUND') || hasReason(error, 'ADAPTER_EXPIRED')) {
      return { adapter: undefined, next: undefined };
    }
    throw error;
  }
}

/** Reads the next operation after the last executed one. Undefined without such an operation. */
export async function readNext(adapter: Adapter, signal: AbortSignal): Promise<GetOperationResponse | undefined> {
  const request = { adapterId: adapter.adapterId, sequenceNumber: adapter.sequenceNumber + 1n };
  try {
    const next = await training.getOperation(request, { signal });
    return next.state === OperationState.QUEUED || next.state === OperationState.RUNNING ? next : undefined;
  } catch (error) {
    if (['OPERATION_NOT_FOUND', 'ADAPTER_NOT_FOUND', 'ADAPTER_EXPIRED'].some((reason) => hasReason(error, reason))) {
      return undefined;
    }
    throw error;
  }
}

async function readResidents(runId: string, signal: AbortSignal): Promise<ResidentAdapter[]> {
  if (!hasScope('sample')) {
    return [];
  }
  const { adapters: residents } = await sampler.listResidentAdapters({ pageSize: PAGE_SIZE }, { signal });
  return residents.filter((resident) => resident.adapterId === runId);
}
