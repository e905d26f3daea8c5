// Trains an adapter to answer a question and streams its answer, with the package twinkle-grpc.
//   npm install && npm run build
//   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... node dist/program.js
import { createHash } from 'node:crypto';
import { codeName, newId, type SampleInit, TwinkleClient, TwinkleError, UsageError } from 'twinkle-grpc';
import { FileFormat } from 'twinkle-grpc/api/data/v1/dataset_pb';
import { DatasetService } from 'twinkle-grpc/api/data/v1/dataset_service_pb';
import { LoaderService } from 'twinkle-grpc/api/data/v1/loader_service_pb';
import { Role } from 'twinkle-grpc/api/data/v1/message_pb';
import { SamplerService } from 'twinkle-grpc/api/sampler/v1/sampler_service_pb';
import { ServerService } from 'twinkle-grpc/api/server/v1/server_service_pb';

const STEPS = 16;
// The file of this program is small; chunks of 1 MiB are recommended.
const CHUNK_BYTES = 64;
const QUESTION = 'Who are you?';
const ANSWER = 'I am Twinkle, and I train models.';
const message = { role: Role.USER, parts: [{ part: { case: 'text' as const, value: QUESTION } }] };
const prompt = { content: { case: 'chat' as const, value: { trajectory: { messages: [message] } } } };

async function trainableModels(client: TwinkleClient): Promise<string[]> {
  const { services } = await client.service(ServerService).getServerInfo({});
  return services.flatMap((service) => service.baseModels.filter((item) => item.isTrainable)).map((it) => it.baseModel);
}

/** Yields a file as a header and chunks. */
async function* parts(uploadId: string, bytes: Uint8Array) {
  const sha256 = createHash('sha256').update(bytes).digest();
  yield { part: { case: 'header', value: { uploadId, sizeBytes: BigInt(bytes.length), sha256 } } } as const;
  for (let offset = 0; offset < bytes.length; offset += CHUNK_BYTES) {
    const data = bytes.subarray(offset, offset + CHUNK_BYTES);
    yield { part: { case: 'chunk', value: { offset: BigInt(offset), data } } } as const;
  }
}

/** Prepares training batches on the server, which tokenizes the chats, and returns the id of their loader. */
async function openLoader(client: TwinkleClient, baseModel: string): Promise<string> {
  const messages = [
    { role: 'user', content: QUESTION },
    { role: 'assistant', content: ANSWER },
  ];
  const bytes = new TextEncoder().encode(`${JSON.stringify({ messages })}\n`);
  const datasets = client.service(DatasetService);
  const { uploadId, committedBytes } = await datasets.upload(parts(newId('up'), bytes));
  console.log(`uploaded: ${committedBytes}`);
  const { dataset } = await datasets.createDataset({
    requestId: newId('rq'),
    source: { source: { case: 'upload', value: { uploadId, format: FileFormat.JSONL } } },
    steps: [{ step: { case: 'setTemplate', value: { baseModel } } }, { step: { case: 'encode', value: {} } }],
  });
  const request = { requestId: newId('rq'), datasetId: dataset?.datasetId ?? '', batchSize: 1 };
  const { loader } = await client.service(LoaderService).openLoader(request);
  return loader?.loaderId ?? '';
}

/** Trains an adapter, and returns a reference to the version that it publishes at the end. */
async function train(client: TwinkleClient, baseModel: string, loaderId: string) {
  const adapter = await client.createAdapter({ baseModel, loraConfig: { loraRank: 8 } });
  const losses: string[] = [];
  for (let step = 1; step <= STEPS; step += 1) {
    // Both operations are started at once; they run in this order, each exactly once. Without a cursor, each step reads
    // the first batch.
    const [{ outcome }] = await Promise.all([
      adapter.run('forwardBackward', { batch: { source: { case: 'loader', value: { loaderId } } } }),
      adapter.run('clipGradAndStep', { learningRate: 0.005 }),
    ]);
    if (outcome.case === 'forward') {
      losses.push((outcome.value.loss / Number(outcome.value.labelCount)).toFixed(3));
    }
  }
  console.log(`losses: ${losses.join(' ')}`);
  const { outcome } = await adapter.run('publishVersion', {});
  if (outcome.case !== 'publish') {
    throw new Error('the result has no version');
  }
  return { adapterId: adapter.adapterId, version: { case: 'exact', value: outcome.value.version } } as const;
}

async function sample(client: TwinkleClient, request: SampleInit): Promise<void> {
  let text = '';
  for await (const { event } of client.sample(request)) {
    if (event.case === 'delta' || event.case === 'finished') {
      text += event.value.text;
    }
  }
  console.log(`sampled: ${text}`);
}

/** Sends an invalid request, and prints the reason and the field of the error. */
async function refuse(client: TwinkleClient, baseModel: string): Promise<void> {
  try {
    await client.createAdapter({ baseModel, loraConfig: { loraRank: -1 } });
  } catch (error) {
    if (!(error instanceof UsageError)) {
      throw error;
    }
    console.log(`refused: ${error.reason} ${error.violations[0]?.field}`);
  }
}

/** Reads a stream until it fails, and returns the name of its status. */
async function statusOf<T>(stream: AsyncIterable<T>, onResponse: () => void = () => undefined): Promise<string> {
  try {
    for await (const _ of stream) {
      onResponse();
    }
    return 'OK';
  } catch (error) {
    if (!(error instanceof TwinkleError)) {
      throw error;
    }
    return codeName(error.code);
  }
}

async function main(client: TwinkleClient): Promise<void> {
  const models = await trainableModels(client);
  console.log(`models: ${models.join(' ')}`);
  const baseModel = process.env['TWINKLE_MODEL'] ?? models[0] ?? '';

  const loaderId = await openLoader(client, baseModel);
  const adapter = await train(client, baseModel, loaderId);
  await sample(client, { baseModel, adapter, prompt, params: { maxTokens: 40, temperature: 0 } });

  await refuse(client, baseModel);
  // A watch never ends, so it ends at its deadline.
  const load = client.service(SamplerService).watchLoad({}, { timeoutMs: 500 });
  console.log(`deadline: ${await statusOf(load)}`);
  // Cancelling a call also ends its work at the sampler.
  const cancelling = new AbortController();
  const long = client.sample({ baseModel, prompt, params: { isEosIgnored: true } }, { signal: cancelling.signal });
  console.log(`cancelled: ${await statusOf(long, () => cancelling.abort())}`);
}

const client = new TwinkleClient({
  onRetry: ({ error, delayMs }) => console.warn(`${error.message}; next attempt in ${delayMs} ms`),
});
try {
  await main(client);
} catch (error) {
  if (!(error instanceof TwinkleError)) {
    throw error;
  }
  console.error(error.message);
  process.exitCode = 1;
} finally {
  client.close();
}
