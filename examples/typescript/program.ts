// Trains an adapter to answer a question, and streams an answer from the trained version.
//   npm install twinkle-grpc
//   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... node dist/program.js
import { elements, type SampleInit, supervisedBatch, TwinkleClient, TwinkleError } from 'twinkle-grpc';
import { Role } from 'twinkle-grpc/api/data/v1/message_pb';

const STEPS = 8;
const baseModel = process.env['TWINKLE_MODEL'] ?? 'smollm2-135m-instruct';
const message = { role: Role.USER, parts: [{ part: { case: 'text', value: 'Who are you?' } }] } as const;
const question: SampleInit['prompt'] = {
  content: { case: 'chat', value: { trajectory: { messages: [{ ...message, parts: [...message.parts] }] } } },
};

/** Returns the tokens to which the server converts a prompt. */
async function tokensOf(client: TwinkleClient, prompt: SampleInit['prompt']): Promise<number[]> {
  for await (const { event } of client.sample({ baseModel, prompt, params: { maxTokens: 0 } })) {
    if (event.case === 'prompt') {
      return elements(event.value.tokenIds);
    }
  }
  throw new Error('the response has no prompt');
}

async function main(client: TwinkleClient): Promise<void> {
  const asked = await tokensOf(client, question);
  const answer = await tokensOf(client, { content: { case: 'text', value: 'I am Twinkle, and I train models.' } });
  const features = supervisedBatch([{ tokenIds: [...asked, ...answer], promptLength: asked.length }]);

  const adapter = await client.createAdapter({ baseModel, loraConfig: { loraRank: 8 } });
  for (let step = 1; step <= STEPS; step += 1) {
    // Both operations are started at once; they run in this order, each exactly once.
    const [{ outcome }] = await Promise.all([
      adapter.run('forwardBackward', { batch: { source: { case: 'features', value: features } } }),
      adapter.run('clipGradAndStep', { learningRate: 0.005 }),
    ]);
    if (outcome.case === 'forward') {
      console.log(`step ${step}: loss ${(outcome.value.loss / Number(outcome.value.labelCount)).toFixed(4)}`);
    }
  }

  const { outcome } = await adapter.run('publishVersion', {});
  if (outcome.case !== 'publish') {
    throw new Error('the result has no version');
  }
  const { version } = outcome.value;
  process.stdout.write(`version ${version}: `);
  const weights = { adapterId: adapter.adapterId, version: { case: 'exact', value: version } } as const;
  const params = { maxTokens: 20, temperature: 0 };
  for await (const { event } of client.sample({ baseModel, adapter: weights, prompt: question, params })) {
    if (event.case === 'delta' || event.case === 'finished') {
      process.stdout.write(event.value.text);
    }
  }
  console.log();
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
