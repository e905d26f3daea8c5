/** Host, port and security of a server. */
export interface Address {
  readonly host: string;
  readonly port: number;
  readonly isSecure: boolean;
}

const SECURE: Readonly<Record<string, boolean | undefined>> = {
  'http:': false,
  'grpc:': false,
  'https:': true,
  'grpcs:': true,
};
const DEFAULT_PORT = 8000;

/**
 * Parses `host:port`, or `<scheme>://host:port` with one of the schemes http, https, grpc and grpcs. A path is ignored.
 * The port defaults to 443 with TLS and to 8000 without.
 *
 * @throws TypeError if `text` has none of these forms.
 */
export function parseAddress(text: string): Address {
  const full = text.includes('://') ? text : `grpc://${text}`;
  const isSecure = SECURE[full.slice(0, full.indexOf('://') + 1)];
  // URLs with a scheme that browsers do not know have no host, and those of http omit the default port.
  const [, host = '', port = ''] =
    /^\w+:\/\/(\[[\da-fA-F:.]+\]|[^\s:/?#@[\]]+)(?::(\d{1,5}))?(?:[/?#].*)?$/.exec(full) ?? [];
  const number = port ? Number(port) : isSecure ? 443 : DEFAULT_PORT;
  if (isSecure === undefined || !host || number < 1 || number > 65_535) {
    const schemes = Object.keys(SECURE).join(', ').replaceAll(':', '');
    throw new TypeError(
      `address '${text}' is malformed; use 'host:port', or '<scheme>://host:port' with one of the schemes ${schemes}`,
    );
  }
  return { host, port: number, isSecure };
}
