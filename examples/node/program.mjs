// Trains an adapter to answer a question and streams its answer, with plain grpc-js. It reads the contracts in the folder
// protos at run time, and needs no generated code.
//   npm install
//   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... node program.mjs
import { createHash, randomUUID } from 'node:crypto';
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';

const STEPS = 16;
// The file of this program is small; chunks of 1 MiB are recommended.
const CHUNK_BYTES = 64;
const QUESTION = { role: 'user', content: 'Who are you?' };
const ANSWER = { role: 'assistant', content: 'I am Twinkle, and I train models.' };

const protos = fileURLToPath(new URL('../../protos', import.meta.url));
const services = ['server/v1/server', 'data/v1/dataset', 'data/v1/loader', 'model/v1/adapter', 'model/v1/training'];
const files = [...services, 'sampler/v1/sampler'].map((name) => `twinkle/api/${name}_service.proto`);
const contracts = loadSync([...files, 'google/rpc/error_details.proto'], {
  includeDirs: [protos, `${protos}/third_party`],
  keepCase: true,
  enums: String,
  longs: Number,
  defaults: true,
  oneofs: true,
  json: true, // decodes google.protobuf.Any, which contains the details of errors
});
const { data, model, sampler, server } = grpc.loadPackageDefinition(contracts).twinkle.api;

const address = process.env.TWINKLE_SERVER_URL;
const authority = process.env.TWINKLE_CA;
const credentials = authority ? grpc.credentials.createSsl(readFileSync(authority)) : grpc.credentials.createInsecure();
const metadata = new grpc.Metadata();
metadata.set('authorization', `Bearer ${process.env.TWINKLE_API_KEY}`);

/** Calls a unary method. Each call has a deadline, because gRPC waits forever without one. */
function unary(client, method, request, seconds = 60) {
  return new Promise((resolve, reject) => {
    const done = (error, response) => (error ? reject(error) : resolve(response));
    client[method](request, metadata, { deadline: Date.now() + 1000 * seconds }, done);
  });
}

/** Uploads a file as a header and chunks, and returns the id of the upload. */
async function upload(datasets, bytes) {
  const header = {
    upload_id: randomUUID(),
    size_bytes: bytes.length,
    sha256: createHash('sha256').update(bytes).digest(),
  };
  const { committed_bytes } = await new Promise((resolve, reject) => {
    const call = datasets.Upload(metadata, (error, response) => (error ? reject(error) : resolve(response)));
    call.write({ header });
    for (let offset = 0; offset < bytes.length; offset += CHUNK_BYTES) {
      call.write({ chunk: { offset, data: bytes.subarray(offset, offset + CHUNK_BYTES) } });
    }
    call.end();
  });
  console.log(`uploaded: ${committed_bytes}`);
  return header.upload_id;
}

/** Prepares training batches on the server, which tokenizes the chats, and returns the id of their loader. */
async function openLoader(baseModel) {
  const datasets = new data.v1.DatasetService(address, credentials);
  const loaders = new data.v1.LoaderService(address, credentials);
  const rows = Buffer.from(`${JSON.stringify({ messages: [QUESTION, ANSWER] })}\n`);
  const uploadId = await upload(datasets, rows);
  const { dataset } = await unary(datasets, 'CreateDataset', {
    request_id: randomUUID(),
    source: { upload: { upload_id: uploadId, format: 'FILE_FORMAT_JSONL' } },
    steps: [{ set_template: { base_model: baseModel } }, { encode: {} }],
  });
  const request = { request_id: randomUUID(), dataset_id: dataset.dataset_id, batch_size: 1 };
  return (await unary(loaders, 'OpenLoader', request)).loader.loader_id;
}

/** Trains the adapter with one stream, and returns the version that it publishes at the end. */
async function train(adapterId, loaderId) {
  const verbs = [];
  for (let step = 0; step < STEPS; step += 1) {
    // Without a cursor, each step reads the first batch.
    verbs.push({ forward_backward: { batch: { loader: { loader_id: loaderId } } } });
    verbs.push({ clip_grad_and_step: { learning_rate: 0.005 } });
  }
  verbs.push({ publish_version: {} });

  const call = new model.v1.TrainingService(address, credentials).Train(metadata);
  // Operations run in the order of their numbers. They are sent without waiting, so that the model is never idle.
  verbs.forEach((verb, index) => {
    call.write({ operation: { adapter_id: adapterId, sequence_number: index + 1, ...verb } });
  });
  call.end();
  const losses = [];
  let version;
  for await (const { result } of call) {
    if (result.error) {
      throw new Error(`operation ${result.sequence_number} failed: ${result.error.message}`);
    }
    if (result.forward) {
      losses.push((result.forward.loss / result.forward.label_count).toFixed(3));
    }
    version = result.publish?.version ?? version;
  }
  console.log(`losses: ${losses.join(' ')}`);
  return version;
}

/** Returns a request that asks the question of an adapter version, or of the base model. */
function sampleRequest(baseModel, adapter, params) {
  const message = { role: 'ROLE_USER', parts: [{ text: QUESTION.content }] };
  return { base_model: baseModel, adapter, prompt: { chat: { trajectory: { messages: [message] } } }, params };
}

async function sample(samplers, request) {
  let text = '';
  for await (const { delta, finished } of samplers.Sample(request, metadata)) {
    text += (delta ?? finished)?.text ?? '';
  }
  console.log(`sampled: ${text}`);
}

/** Sends an invalid request, and prints the reason and the field of the error. */
async function refuse(adapters, baseModel) {
  const request = { request_id: randomUUID(), base_model: baseModel, lora_config: { lora_rank: -1 } };
  const error = await unary(adapters, 'CreateAdapter', request).catch((found) => found);
  const [bytes] = error.metadata.get('grpc-status-details-bin');
  const { details } = contracts['google.rpc.Status'].deserialize(bytes);
  const detail = (name) => details.find((any) => any['@type'] === `type.googleapis.com/google.rpc.${name}`);
  console.log(`refused: ${detail('ErrorInfo').reason} ${detail('BadRequest').field_violations[0].field}`);
}

/** Reads a stream until it fails, and returns the name of its status. */
async function statusOf(call, onResponse = () => {}) {
  try {
    for await (const response of call) {
      onResponse(response);
    }
    return 'OK';
  } catch (error) {
    return grpc.status[error.code];
  }
}

const adapters = new model.v1.AdapterService(address, credentials);
const samplers = new sampler.v1.SamplerService(address, credentials);
const info = await unary(new server.v1.ServerService(address, credentials), 'GetServerInfo', {});
const models = info.services.flatMap((service) => service.base_models.filter((item) => item.is_trainable));
console.log(`models: ${models.map((item) => item.base_model).join(' ')}`);
const baseModel = process.env.TWINKLE_MODEL ?? models[0].base_model;

const loaderId = await openLoader(baseModel);
const { adapter } = await unary(adapters, 'CreateAdapter', {
  request_id: randomUUID(),
  base_model: baseModel,
  lora_config: { lora_rank: 8 },
});
const version = await train(adapter.adapter_id, loaderId);
const trained = { adapter_id: adapter.adapter_id, exact: version };
await sample(samplers, sampleRequest(baseModel, trained, { max_tokens: 40, temperature: 0 }));

await refuse(adapters, baseModel);
// A watch never ends, so it ends at its deadline.
console.log(`deadline: ${await statusOf(samplers.WatchLoad({}, metadata, { deadline: Date.now() + 500 }))}`);
// Cancelling a call also ends its work at the sampler.
const long = samplers.Sample(sampleRequest(baseModel, null, { is_eos_ignored: true }), metadata);
console.log(`cancelled: ${await statusOf(long, () => long.cancel())}`);
