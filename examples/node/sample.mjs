// Streams an answer from a gateway with plain grpc-js. It needs only the .proto files and no generated client.
//   npm install @grpc/grpc-js @grpc/proto-loader
//   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... node examples/node/sample.mjs 'Who are you?'
import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { fileURLToPath } from 'node:url';

const protos = fileURLToPath(new URL('../../protos', import.meta.url));
const contract = loadSync('twinkle/api/sampler/v1/sampler_service.proto', {
  includeDirs: [protos, `${protos}/third_party`],
  keepCase: true,
  oneofs: true,
});
const { SamplerService } = grpc.loadPackageDefinition(contract).twinkle.api.sampler.v1;

const client = new SamplerService(process.env.TWINKLE_SERVER_URL.replace(/^\w+:\/\//, ''), grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
metadata.set('authorization', `Bearer ${process.env.TWINKLE_API_KEY}`);

const message = { role: 'ROLE_USER', parts: [{ text: process.argv[2] ?? 'Who are you?' }] };
const call = client.Sample(
  {
    base_model: process.env.TWINKLE_MODEL ?? 'smollm2-135m-instruct',
    prompt: { chat: { trajectory: { messages: [message] } } },
    params: { max_tokens: 40, temperature: 0 },
  },
  metadata,
);
call.on('data', ({ delta, finished }) => process.stdout.write((delta ?? finished)?.text ?? ''));
call.on('end', () => console.log());
call.on('error', (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
