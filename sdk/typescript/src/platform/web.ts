// Browsers call the gateway's HTTP port with gRPC-Web, which has no streams of requests.
import { createGrpcWebTransport } from '@connectrpc/connect-web';
import type { Connection, ConnectOptions, Environment } from './connection.js';

/** Path of the gateway's gRPC-Web methods. */
const WEB_PATH = '/console/rpc';

export const environment = (): Environment => ({ address: '', apiKey: '', ca: '' });

/**
 * Returns a connection to `address`, or to the server of the page. The gateway refuses pages of other servers.
 *
 * @throws TypeError if the address is not an HTTP URL, or `ca` is given.
 */
export function connect({ address, ca, interceptors }: ConnectOptions): Connection {
  if (ca) {
    throw new TypeError('ca: browsers use the CA certificates of their system; omit `ca`');
  }
  const url = new URL(address || location.origin);
  if (url.protocol !== 'http:' && url.protocol !== 'https:') {
    throw new TypeError(`address '${address}' must begin with http:// or https:// in a browser`);
  }
  const baseUrl = `${url.origin}${url.pathname === '/' ? WEB_PATH : url.pathname}`;
  return { transport: createGrpcWebTransport({ baseUrl, interceptors }), close: () => undefined };
}
