// An adapter in training.
import { create, type MessageInitShape } from '@bufbuild/protobuf';
import { type CallOptions, type Client, Code } from '@connectrpc/connect';
import { ServerError } from './errors.js';
import type { Adapter } from './gen/twinkle/api/model/v1/adapter_pb.js';
import type { AdapterService } from './gen/twinkle/api/model/v1/adapter_service_pb.js';
import { type Operation, OperationSchema } from './gen/twinkle/api/model/v1/operation_pb.js';
import type { OperationResult } from './gen/twinkle/api/model/v1/operation_result_pb.js';
import type { TrainingService } from './gen/twinkle/api/model/v1/training_service_pb.js';
import { OperationLog } from './operations.js';

type Verbs = Exclude<Operation['verb'], { case: undefined }>;
type VerbInits = Exclude<
  NonNullable<Exclude<MessageInitShape<typeof OperationSchema>, Operation>['verb']>,
  { case?: undefined }
>;
/** Name of a verb, such as 'forwardBackward'; see the fields of `Operation.verb` in the contract. */
export type VerbName = Verbs['case'];
/** Message of a verb. */
export type VerbInit<N extends VerbName> = Extract<VerbInits, { case: N }>['value'];

interface Sent {
  readonly operation: MessageInitShape<typeof OperationSchema>;
  readonly options: CallOptions;
}

/**
 * Runs operations on an adapter, each exactly once: they are numbered, and a repeated number has no second effect, also
 * if the service restarts. Only one program at a time should train an adapter.
 */
export class AdapterHandle {
  readonly adapterId: string;
  readonly baseModel: string;
  readonly #log: OperationLog<Sent, OperationResult>;

  constructor(adapter: Adapter, training: Client<typeof TrainingService>, adapters: Client<typeof AdapterService>) {
    const { adapterId } = adapter;
    this.adapterId = adapterId;
    this.baseModel = adapter.baseModel;
    const send = async (sequenceNumber: bigint, { operation, options }: Sent): Promise<OperationResult> => {
      const numbered = create(OperationSchema, { ...operation, adapterId, sequenceNumber });
      const { result } = await training.execute({ operation: numbered, isWaitingAllowed: true }, options);
      if (!result) {
        throw new ServerError({ code: Code.Internal, rawMessage: 'the response of Execute has no result' });
      }
      return result;
    };
    this.#log = new OperationLog(
      {
        send,
        fill: async (number) => {
          await send(number, {
            operation: { verb: { case: 'configure', value: { trainingConfig: {} } } },
            options: {},
          });
        },
        find: async (sequenceNumber) => {
          await training.getOperation({ adapterId, sequenceNumber });
        },
        lastNumber: async () => (await adapters.getAdapter({ adapterId })).adapter?.sequenceNumber ?? 0n,
      },
      adapter.sequenceNumber,
    );
  }

  /** Number of the last operation that was started. */
  get lastNumber(): bigint {
    return this.#log.lastNumber;
  }

  /**
   * Runs an operation, for example `run('clipGradAndStep', { maxGradNorm: 1 })`. Operations that are started without
   * waiting run in the order of their starts.
   *
   * @throws TwinkleError if the operation failed or was refused. An operation that is cancelled by `options.signal` or
   * whose deadline passes may still be executed; the next operation finds out whether it was.
   */
  run<N extends VerbName>(name: N, value: VerbInit<N>, options: CallOptions = {}): Promise<OperationResult> {
    // The compiler cannot relate the name and the message of a union.
    const verb = { case: name, value } as VerbInits;
    return this.#log.run({ operation: { verb }, options });
  }
}
