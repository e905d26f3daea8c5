// Clients of the services, over gRPC-Web.
import { Code, errorFrom, type Interceptor, TwinkleClient } from 'twinkle-grpc';
import { CheckpointService } from 'twinkle-grpc/api/checkpoint/v1/checkpoint_service_pb';
import { VersionService } from 'twinkle-grpc/api/checkpoint/v1/version_service_pb';
import { DatasetService } from 'twinkle-grpc/api/data/v1/dataset_service_pb';
import { CatalogueService } from 'twinkle-grpc/api/gateway/v1/catalogue_service_pb';
import { ExportService } from 'twinkle-grpc/api/gateway/v1/export_service_pb';
import { FleetService } from 'twinkle-grpc/api/gateway/v1/fleet_service_pb';
import { KeyService } from 'twinkle-grpc/api/gateway/v1/key_service_pb';
import { MetricService } from 'twinkle-grpc/api/gateway/v1/metric_service_pb';
import { QuotaService } from 'twinkle-grpc/api/gateway/v1/quota_service_pb';
import { RolloutService } from 'twinkle-grpc/api/gateway/v1/rollout_service_pb';
import { TraceService } from 'twinkle-grpc/api/gateway/v1/trace_service_pb';
import { AdapterService } from 'twinkle-grpc/api/model/v1/adapter_service_pb';
import { TrainingService } from 'twinkle-grpc/api/model/v1/training_service_pb';
import { SamplerService } from 'twinkle-grpc/api/sampler/v1/sampler_service_pb';
import { ServerService } from 'twinkle-grpc/api/server/v1/server_service_pb';
import { expire } from './session.svelte';

const endSession: Interceptor = (next) => async (request) => {
  try {
    return await next(request);
  } catch (error) {
    if (errorFrom(error).code === Code.Unauthenticated) {
      expire();
    }
    throw error;
  }
};

/** Sends calls once: pages show a failure at once, and offer to try again. */
export const client = new TwinkleClient({ retryTimeoutMs: 0, interceptors: [endSession] });

export const adapters = client.service(AdapterService);
export const catalogue = client.service(CatalogueService);
export const checkpoints = client.service(CheckpointService);
export const datasets = client.service(DatasetService);
export const exports = client.service(ExportService);
export const fleet = client.service(FleetService);
export const keys = client.service(KeyService);
export const metrics = client.service(MetricService);
export const quotas = client.service(QuotaService);
export const rollouts = client.service(RolloutService);
export const sampler = client.service(SamplerService);
export const server = client.service(ServerService);
export const traces = client.service(TraceService);
export const training = client.service(TrainingService);
export const versions = client.service(VersionService);
