// The combined load of the samplers.
import { type Replica, ReplicaState } from 'twinkle-grpc/api/gateway/v1/fleet_service_pb';
import type { EngineLoad } from 'twinkle-grpc/api/sampler/v1/engine_pb';

export interface Load {
  runningCount: number;
  /** Number of sequences that can run at the same time. 0 if the number is not known. */
  slotCount: number;
  waitingCount: number;
  tokensPerSecond: number;
  /** Highest fraction of a key-value cache in use, in [0, 1]. Undefined without samplers. */
  cacheUse: number | undefined;
}

export interface Samplers extends Load {
  samplerCount: number;
  readyCount: number;
}

export function loadOf(loads: EngineLoad[]): Load {
  const sum = (value: (load: EngineLoad) => number): number => loads.reduce((total, load) => total + value(load), 0);
  return {
    runningCount: sum((load) => load.runningSequenceCount),
    slotCount: sum((load) => load.maxSequenceCount),
    waitingCount: sum((load) => load.waitingSequenceCount),
    tokensPerSecond: sum((load) => load.tokensPerSecond),
    cacheUse: loads.length ? Math.max(...loads.map((load) => load.kvUsage)) : undefined,
  };
}

export const isSampler = ({ service }: Replica): boolean => service === 'sampler';

export function samplersOf(replicas: Replica[]): Samplers {
  const samplers = replicas.filter(isSampler);
  return {
    ...loadOf(samplers.flatMap(({ load }) => (load ? [load] : []))),
    samplerCount: samplers.length,
    readyCount: samplers.filter(({ state }) => state === ReplicaState.READY).length,
  };
}
