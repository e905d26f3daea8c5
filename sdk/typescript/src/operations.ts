// Numbers the operations of one adapter in the order in which they start, so that each is applied once.
import { Code } from '@connectrpc/connect';
import { NotFoundError, type TwinkleError, errorFrom } from './errors.js';

/** Reasons of errors that show that the service expects a different number. */
const NUMBER_CONFLICTS: readonly string[] = ['SEQUENCE_GAP', 'SEQUENCE_REUSED'];

/** Calls of the training service that numbering needs. */
export interface NumberedCalls<Operation, Result> {
  /** Sends an operation; sending the same number and operation again has no second effect. */
  send(number: bigint, operation: Operation): Promise<Result>;
  /** Sends an operation without an effect, which uses a number that later operations wait for. */
  fill(number: bigint): Promise<void>;
  /** Throws NotFoundError if the service never accepted an operation with this number. */
  find(number: bigint): Promise<void>;
  /** Returns the number of the last operation that the service accepted. */
  lastNumber(): Promise<bigint>;
}

/**
 * The number of a refused operation is used again. If the client cannot tell whether a number was used, it asks the
 * service before it assigns the next one.
 */
export class OperationLog<Operation, Result> {
  readonly #calls: NumberedCalls<Operation, Result>;
  readonly #inDoubt = new Set<bigint>();
  readonly #pending = new Set<Promise<unknown>>();
  #lastNumber: bigint;
  #isStale = false;
  #turn: Promise<unknown> = Promise.resolve();

  constructor(calls: NumberedCalls<Operation, Result>, lastNumber: bigint) {
    this.#calls = calls;
    this.#lastNumber = lastNumber;
  }

  /** Number of the last operation that was started. */
  get lastNumber(): bigint {
    return this.#lastNumber;
  }

  /**
   * Sends an operation and returns its result. Operations that are started without waiting run in the order of their
   * starts.
   *
   * @throws TwinkleError if the operation failed or was refused.
   */
  async run(operation: Operation): Promise<Result> {
    const number = await this.#exclusively(() => this.#takeNumber());
    const sending = this.#calls.send(number, operation);
    this.#pending.add(sending);
    try {
      return await sending;
    } catch (reason) {
      const error = errorFrom(reason);
      this.#pending.delete(sending);
      await this.#afterFailure(number, error);
      throw error;
    } finally {
      this.#pending.delete(sending);
    }
  }

  async #exclusively<T>(work: () => Promise<T>): Promise<T> {
    const done = this.#turn.then(work);
    this.#turn = done.catch(() => undefined);
    return done;
  }

  async #takeNumber(): Promise<bigint> {
    if (this.#isStale) {
      await Promise.allSettled(this.#pending);
      this.#lastNumber = await this.#calls.lastNumber();
      this.#isStale = false;
      this.#inDoubt.clear();
    }
    await this.#resolveDoubts();
    this.#lastNumber += 1n;
    return this.#lastNumber;
  }

  async #afterFailure(number: bigint, error: TwinkleError): Promise<void> {
    if (NUMBER_CONFLICTS.includes(error.reason)) {
      this.#isStale = true;
    } else if (freesNumber(error)) {
      await this.#returnNumber(number);
    } else if (error.disposition !== 'FAILED') {
      this.#inDoubt.add(number);
      if (error.code === Code.Canceled && number < this.#lastNumber) {
        // Later operations wait for this number. If it cannot be resolved now, the next operation tries again.
        await this.#resolveDoubts().catch(() => undefined);
      }
    }
  }

  async #returnNumber(number: bigint): Promise<void> {
    if (number === this.#lastNumber) {
      this.#lastNumber -= 1n;
    } else {
      await this.#calls.fill(number);
    }
  }

  /** Asks the service for the numbers in doubt, and frees the unused ones. */
  async #resolveDoubts(): Promise<void> {
    // Descending order, so that several unused numbers at the end can all be assigned again.
    for (const number of [...this.#inDoubt].sort((a, b) => Number(b - a))) {
      const isUsed = await this.#isOnRecord(number);
      if (this.#inDoubt.delete(number) && !isUsed) {
        await this.#returnNumber(number);
      }
    }
  }

  async #isOnRecord(number: bigint): Promise<boolean> {
    try {
      await this.#calls.find(number);
      return true;
    } catch (reason) {
      if (reason instanceof NotFoundError) {
        return false;
      }
      throw reason;
    }
  }
}

/** Returns whether the operation's number can be used again without asking the service. */
function freesNumber(error: TwinkleError): boolean {
  // The response UNAVAILABLE may belong to a repetition, and an earlier attempt may have reached the service.
  return error.code !== Code.Unavailable && (error.disposition === 'REFUSED' || error.disposition === 'RETRYABLE');
}
