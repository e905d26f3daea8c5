import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { ReplicaSchema, ReplicaState } from 'twinkle-grpc/api/gateway/v1/fleet_service_pb';
import { samplersOf } from './load';

const sampler = (state: ReplicaState, runningSequenceCount: number, kvUsage: number) =>
  create(ReplicaSchema, {
    service: 'sampler',
    state,
    load: { runningSequenceCount, waitingSequenceCount: 1, maxSequenceCount: 32, tokensPerSecond: 12.5, kvUsage },
  });

test('the load of all samplers is added, and other replicas are ignored', () => {
  const replicas = [
    sampler(ReplicaState.READY, 3, 0.25),
    sampler(ReplicaState.LOST, 2, 0.75),
    create(ReplicaSchema, { service: 'sampler', state: ReplicaState.READY }),
    create(ReplicaSchema, { service: 'model', state: ReplicaState.READY }),
  ];
  expect(samplersOf(replicas)).toEqual({
    samplerCount: 3,
    readyCount: 2,
    runningCount: 5,
    slotCount: 64,
    waitingCount: 2,
    tokensPerSecond: 25,
    cacheUse: 0.75,
  });
  expect(samplersOf([]).cacheUse).toBeUndefined();
});
