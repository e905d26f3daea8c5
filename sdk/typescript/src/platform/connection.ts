import type { Interceptor, Transport } from '@connectrpc/connect';

export interface ConnectOptions {
  /** Address of the gateway; empty for the platform's default. */
  readonly address: string;
  /** Path of a PEM file of CA certificates; empty for those of the platform. */
  readonly ca: string;
  readonly interceptors: Interceptor[];
}

/** A transport and its connection. */
export interface Connection {
  readonly transport: Transport;
  /** Cancels running calls. */
  close(): void;
}

/** Values that a program reads from its environment. */
export interface Environment {
  readonly address: string;
  readonly apiKey: string;
  readonly ca: string;
}
