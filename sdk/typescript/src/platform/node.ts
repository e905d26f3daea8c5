// Node.js calls the gateway's gRPC port over HTTP/2.
import { readFileSync } from 'node:fs';
import { createGrpcTransport, Http2SessionManager } from '@connectrpc/connect-node';
import { parseAddress } from '../address.js';
import type { Connection, ConnectOptions, Environment } from './connection.js';

const PING_INTERVAL_MS = 30_000;
const PING_TIMEOUT_MS = 10_000;

export const environment = (): Environment => ({
  address: process.env['TWINKLE_SERVER_URL'] ?? '',
  apiKey: process.env['TWINKLE_API_KEY'] ?? '',
  ca: process.env['TWINKLE_CA'] ?? '',
});

/**
 * Returns a connection. The first call connects, and later calls reconnect after a loss.
 *
 * @throws TypeError if there is no address, the address is malformed, or `ca` contains no certificate.
 */
export function connect({ address, ca, interceptors }: ConnectOptions): Connection {
  if (!address) {
    throw new TypeError('no server address; pass `address`, or set TWINKLE_SERVER_URL');
  }
  const { host, port, isSecure } = parseAddress(address);
  const baseUrl = `${isSecure ? 'https' : 'http'}://${host}:${port}`;
  const sessionManager = new Http2SessionManager(
    baseUrl,
    { pingIntervalMs: PING_INTERVAL_MS, pingTimeoutMs: PING_TIMEOUT_MS },
    isSecure && ca ? { ca: authorities(ca) } : {},
  );
  return {
    transport: createGrpcTransport({ baseUrl, sessionManager, interceptors }),
    close: () => sessionManager.abort(),
  };
}

function authorities(ca: string): string {
  let content: string;
  try {
    content = readFileSync(ca, 'utf8');
  } catch (cause) {
    throw new TypeError(`ca: cannot read ${ca}; give a PEM file of certificates`, { cause });
  }
  if (!content.includes('-----BEGIN CERTIFICATE-----')) {
    throw new TypeError(`ca: ${ca} contains no PEM certificate; give a PEM file of CA certificates`);
  }
  return content;
}
