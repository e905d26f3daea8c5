// Failures of the connection, which have no details from a server.
import { Code, ConnectError } from '@connectrpc/connect';

/** Messages of browsers and of connect-web for a connection that failed or ended in the middle of a response. */
const LOST_MESSAGES = /fetch|network|load failed|input stream|missing trailer|premature|incomplete/i;
const UNTRUSTED =
  'the certificate of the server is not signed by a trusted CA; set `ca`, or TWINKLE_CA, to the PEM file of its CA';
/** Problems of TLS that repeating the call does not solve, by the code of Node.js. */
const PROBLEMS: Readonly<Record<string, string | undefined>> = {
  CERT_HAS_EXPIRED: 'the certificate of the server has expired; ask its operator to renew it',
  CERT_NOT_YET_VALID: 'the certificate of the server is not valid yet; check the clocks of both machines',
  DEPTH_ZERO_SELF_SIGNED_CERT: UNTRUSTED,
  ERR_SSL_PACKET_LENGTH_TOO_LONG: 'the server does not use TLS; use an address with http://',
  ERR_SSL_WRONG_VERSION_NUMBER: 'the server does not use TLS; use an address with http://',
  ERR_TLS_CERT_ALTNAME_INVALID: 'the certificate of the server is not for this host; use a host name that it contains',
  SELF_SIGNED_CERT_IN_CHAIN: UNTRUSTED,
  UNABLE_TO_GET_ISSUER_CERT_LOCALLY: UNTRUSTED,
  UNABLE_TO_VERIFY_LEAF_SIGNATURE: UNTRUSTED,
};

/** Returns why the connection cannot work with this address and these certificates; empty for other failures. */
export function connectionProblem(error: ConnectError): string {
  return (
    systemCodes(error)
      .map((code) => PROBLEMS[code] ?? '')
      .find(Boolean) ?? ''
  );
}

/** Returns whether the connection failed, so that the server may be unavailable for some time. */
export function isConnectionLost(error: ConnectError): boolean {
  switch (error.code) {
    case Code.Canceled:
    case Code.Aborted:
      // A server that is stopping cancels calls without details. A refusal of a service has details.
      return true;
    case Code.Internal:
    case Code.Unknown:
    case Code.InvalidArgument:
    case Code.DataLoss:
      return systemCodes(error).length > 0 || LOST_MESSAGES.test(error.rawMessage);
    default:
      return false;
  }
}

/** Codes of the errors of Node.js that caused an error, such as "ECONNRESET". */
function systemCodes(error: ConnectError): string[] {
  const found: string[] = [];
  let cause = error.cause;
  for (let depth = 0; cause instanceof Error && depth < 5; depth += 1) {
    if ('code' in cause && typeof cause.code === 'string') {
      found.push(cause.code);
    }
    cause = cause.cause;
  }
  return found;
}
