// The settings of the playground, and their conversion to requests.
import type { MessageInitShape } from '@bufbuild/protobuf';
import { Role } from 'twinkle-grpc/api/data/v1/message_pb';
import type { SampleRequestSchema } from 'twinkle-grpc/api/sampler/v1/sampler_service_pb';

export interface Settings {
  baseModel: string;
  isChat: boolean;
  system: string;
  prompt: string;
  isThinking: boolean;
  temperature: number;
  maxTokens: number;
  /** Undefined for random samples. */
  seed: number | undefined;
  /** Run to compare with the base model. Empty without a comparison. */
  runId: string;
  runName: string;
  /** Version of the run. 0 is the newest one. */
  version: number;
  /** Checkpoint to use instead of a version. */
  checkpointPath: string;
}

const TOP_TOKENS = 5;
const TEMPERATURE = 0.7;

/** The temperature in an address, or the default if the temperature is absent or invalid. */
export function temperatureOf(text: string | null): number {
  const value = text ? Number(text) : NaN;
  return value >= 0 && value <= 10 ? value : TEMPERATURE;
}

const message = (role: Role, text: string) => ({ role, parts: [{ part: { case: 'text' as const, value: text } }] });

type Request = MessageInitShape<typeof SampleRequestSchema>;

function promptOf({ isChat, system, prompt, isThinking }: Settings): NonNullable<Request['prompt']> {
  if (!isChat) {
    return { content: { case: 'text', value: prompt } };
  }
  const messages = [...(system ? [message(Role.SYSTEM, system)] : []), message(Role.USER, prompt)];
  return { content: { case: 'chat', value: { trajectory: { messages }, isThinkingEnabled: isThinking } } };
}

function adapterOf({ runId, version, checkpointPath }: Settings): NonNullable<Request['adapter']> {
  if (checkpointPath) {
    return { version: { case: 'checkpointPath', value: checkpointPath } };
  }
  return version ? { adapterId: runId, version: { case: 'exact', value: BigInt(version) } } : { adapterId: runId };
}

/** The request for the base model, or for the selected weights. */
export function requestOf(settings: Settings, isTuned: boolean): Request {
  const { baseModel, temperature, maxTokens, seed } = settings;
  return {
    baseModel,
    adapter: isTuned ? adapterOf(settings) : undefined,
    prompt: promptOf(settings),
    params: {
      temperature,
      maxTokens,
      seed: seed === undefined ? undefined : BigInt(seed),
      topLogprobCount: TOP_TOKENS,
    },
  };
}
