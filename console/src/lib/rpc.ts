// Clients of the services, over gRPC-Web.
import { Code, ConnectError, createClient, type Interceptor } from '@connectrpc/connect';
import { createGrpcWebTransport } from '@connectrpc/connect-web';
import { CheckpointService } from '../gen/twinkle/api/checkpoint/v1/checkpoint_service_pb';
import { VersionService } from '../gen/twinkle/api/checkpoint/v1/version_service_pb';
import { DatasetService } from '../gen/twinkle/api/data/v1/dataset_service_pb';
import { CatalogueService } from '../gen/twinkle/api/gateway/v1/catalogue_service_pb';
import { ExportService } from '../gen/twinkle/api/gateway/v1/export_service_pb';
import { FleetService } from '../gen/twinkle/api/gateway/v1/fleet_service_pb';
import { KeyService } from '../gen/twinkle/api/gateway/v1/key_service_pb';
import { MetricService } from '../gen/twinkle/api/gateway/v1/metric_service_pb';
import { QuotaService } from '../gen/twinkle/api/gateway/v1/quota_service_pb';
import { RolloutService } from '../gen/twinkle/api/gateway/v1/rollout_service_pb';
import { TraceService } from '../gen/twinkle/api/gateway/v1/trace_service_pb';
import { AdapterService } from '../gen/twinkle/api/model/v1/adapter_service_pb';
import { TrainingService } from '../gen/twinkle/api/model/v1/training_service_pb';
import { SamplerService } from '../gen/twinkle/api/sampler/v1/sampler_service_pb';
import { ServerService } from '../gen/twinkle/api/server/v1/server_service_pb';
import { expire } from './session.svelte';

const endSession: Interceptor = (next) => async (request) => {
  try {
    return await next(request);
  } catch (error) {
    if (ConnectError.from(error).code === Code.Unauthenticated) {
      expire();
    }
    throw error;
  }
};

const transport = createGrpcWebTransport({ baseUrl: `${location.origin}/console/rpc`, interceptors: [endSession] });

export const adapters = createClient(AdapterService, transport);
export const catalogue = createClient(CatalogueService, transport);
export const checkpoints = createClient(CheckpointService, transport);
export const datasets = createClient(DatasetService, transport);
export const exports = createClient(ExportService, transport);
export const fleet = createClient(FleetService, transport);
export const keys = createClient(KeyService, transport);
export const metrics = createClient(MetricService, transport);
export const quotas = createClient(QuotaService, transport);
export const rollouts = createClient(RolloutService, transport);
export const sampler = createClient(SamplerService, transport);
export const server = createClient(ServerService, transport);
export const traces = createClient(TraceService, transport);
export const training = createClient(TrainingService, transport);
export const versions = createClient(VersionService, transport);
