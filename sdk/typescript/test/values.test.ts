// Addresses, tensors, ids and options.
import { writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { create } from '@bufbuild/protobuf';
import { createRouterTransport } from '@connectrpc/connect';
import { expect, test, vi } from 'vitest';
import { parseAddress } from '../src/address.js';
import { TwinkleClient } from '../src/client.js';
import { DEADLINES_MS } from '../src/gen/deadlines.js';
import { registry } from '../src/gen/registry.js';
import { AdapterService } from '../src/gen/twinkle/api/model/v1/adapter_service_pb.js';
import { Dtype, TensorSchema } from '../src/gen/twinkle/api/tensor/v1/tensor_pb.js';
import { newId } from '../src/ids.js';
import { connect } from '../src/platform/node.js';
import { connect as connectWeb } from '../src/platform/web.js';
import { elements, float32Tensor, int32Tensor, supervisedBatch } from '../src/tensors.js';

test.each([
  ['train.example:7000', 'train.example', 7000, false],
  ['train.example', 'train.example', 8000, false],
  ['https://train.example', 'train.example', 443, true],
  ['https://train.example:443/path', 'train.example', 443, true],
  ['http://train.example:80', 'train.example', 80, false],
  ['grpcs://[::1]:9', '[::1]', 9, true],
])('the address %s', (text, host, port, isSecure) => {
  expect(parseAddress(text)).toEqual({ host, port, isSecure });
});

test.each(['', 'ftp://host:1', 'host:port', 'host:70000', 'http://', 'http://user@host:1'])(
  'the malformed address "%s" is refused',
  (text) => {
    expect(() => parseAddress(text)).toThrow(/malformed; use 'host:port'/);
  },
);

test('tensors have the elements in the order of the contract', () => {
  expect(int32Tensor([1, -2])).toMatchObject({
    dtype: Dtype.INT32,
    shape: [2n],
    data: new Uint8Array([1, 0, 0, 0, 254, 255, 255, 255]),
  });
  expect(elements(int32Tensor([1, -2, 50_000]))).toEqual([1, -2, 50_000]);
  expect(elements(float32Tensor([0.5, -Infinity]))).toEqual([0.5, -Infinity]);
  expect(elements(undefined)).toEqual([]);
  expect(() => elements(create(TensorSchema, { dtype: Dtype.UINT8 }))).toThrow('UINT8');
});

test('labels of a batch are the next tokens after the prompt', () => {
  const [first, second] = supervisedBatch([{ tokenIds: [1, 2, 3, 4], promptLength: 2 }, { tokenIds: [5, 6] }]).features;
  expect(elements(first?.labels)).toEqual([-100, 3, 4, -100]);
  expect(elements(first?.inputIds)).toEqual([1, 2, 3, 4]);
  expect(elements(second?.labels)).toEqual([6, -100]);
});

test('ids are different', () => {
  expect(new Set(Array.from({ length: 100 }, () => newId('rq'))).size).toBe(100);
});

test('deadlines and messages are those of the contracts', () => {
  expect(DEADLINES_MS['twinkle.api.model.v1.TrainingService/Execute']).toBe(600_000);
  expect(DEADLINES_MS['twinkle.api.sampler.v1.SamplerService/Sample']).toBeUndefined();
  expect(registry.getMessage('google.rpc.ErrorInfo')?.name).toBe('ErrorInfo');
  expect(registry.getService(AdapterService.typeName)).toBe(AdapterService);
});

test('the environment has the defaults of the options', () => {
  vi.stubEnv('TWINKLE_SERVER_URL', '');
  expect(() => new TwinkleClient()).toThrow(/TWINKLE_SERVER_URL/);
  vi.stubEnv('TWINKLE_SERVER_URL', 'https://train.example');
  vi.stubEnv('TWINKLE_CA', '/absent.pem');
  expect(() => new TwinkleClient()).toThrow('ca: cannot read /absent.pem');
  new TwinkleClient({ ca: '' }).close();
  vi.unstubAllEnvs();
});

test('a file without a certificate is refused', () => {
  const path = join(tmpdir(), `${newId('ca')}.pem`);
  writeFileSync(path, 'no certificate');
  const options = { address: 'https://host', ca: path, interceptors: [] };
  expect(() => connect(options)).toThrow('contains no PEM certificate');
});

test('browsers accept addresses of pages only', () => {
  expect(() => connectWeb({ address: 'grpc://host:1', ca: '', interceptors: [] })).toThrow('must begin with http://');
  expect(() => connectWeb({ address: 'http://host:1', ca: 'a.pem', interceptors: [] })).toThrow('omit `ca`');
});

test('an adapter is created with an id that makes the request idempotent', async () => {
  const ids: string[] = [];
  const transport = createRouterTransport(({ service }) =>
    service(AdapterService, {
      createAdapter: ({ requestId, baseModel }) => {
        ids.push(requestId);
        return { adapter: { adapterId: 'ad-1', baseModel, sequenceNumber: 2n } };
      },
    }),
  );
  const client = new TwinkleClient({ transport });
  const adapter = await client.createAdapter({ baseModel: 'tiny' });
  expect([adapter.adapterId, adapter.baseModel, adapter.lastNumber]).toEqual(['ad-1', 'tiny', 2n]);
  await client.createAdapter({ baseModel: 'tiny', requestId: 'mine' });
  expect(ids).toEqual([expect.stringMatching(/^rq-/), 'mine']);
});
