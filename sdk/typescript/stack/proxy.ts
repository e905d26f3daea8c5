// A TCP proxy that breaks connections.
import { createServer, connect, type Socket } from 'node:net';
import type { AddressInfo } from 'node:net';

export class Proxy {
  readonly #sockets = new Set<Socket>();
  readonly #server = createServer((client) => this.#serve(client));
  readonly #host: string;
  readonly #port: number;
  #remaining = Infinity;
  /** Number of connections that were broken. */
  cutCount = 0;

  /** @param address `host:port` of the server. */
  constructor(address: string) {
    const [host = '', port = ''] = address.split(':');
    this.#host = host;
    this.#port = Number(port);
  }

  /** Listens on a free port, and returns its address. */
  async start(): Promise<string> {
    await new Promise<void>((resolve) => this.#server.listen(0, '127.0.0.1', resolve));
    return `127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  /** Breaks all connections after this number of further bytes from the server. */
  cutAfter(byteCount: number): void {
    this.#remaining = byteCount;
  }

  stop(): void {
    this.#server.close();
    this.#sockets.forEach((socket) => socket.destroy());
  }

  #serve(client: Socket): void {
    const server = connect(this.#port, this.#host);
    for (const [from, to] of [
      [client, server],
      [server, client],
    ] as const) {
      this.#sockets.add(from);
      from.on('data', (data) => {
        const allowed = from === server ? data.subarray(0, this.#remaining) : data;
        this.#remaining -= from === server ? allowed.length : 0;
        to.write(allowed, () => {
          if (this.#remaining <= 0) {
            this.#remaining = Infinity;
            this.cutCount += 1;
            this.#sockets.forEach((socket) => socket.destroy());
          }
        });
      });
      from.on('error', () => to.destroy());
      from.on('close', () => {
        this.#sockets.delete(from);
        to.destroy();
      });
    }
  }
}
