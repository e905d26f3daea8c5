// Scopes and states of API keys.
import { type ApiKey, Scope } from 'twinkle-grpc/api/gateway/v1/key_service_pb';
import { date, lower } from './format';

/** Every scope with its name, as sessions and the command line write it. */
export const SCOPES: [Scope, string][] = [
  [Scope.TRAIN, 'train'],
  [Scope.SAMPLE, 'sample'],
  [Scope.DATA, 'data'],
  [Scope.OPERATOR, 'operator'],
  [Scope.ADMIN, 'admin'],
  [Scope.FULL_PARAMETERS, 'full_parameters'],
];

export const DEFAULT_SCOPES = [Scope.TRAIN, Scope.SAMPLE, Scope.DATA];

export const scopeNames = (key: ApiKey): string => key.scopes.map((scope) => lower(Scope[scope])).join(', ');

export type KeyState = 'valid' | 'replaced' | 'expired' | 'revoked';

/** State of a key. A replaced key stays valid until its time of retirement. */
export function keyState({ revokeTime, expireTime, retireTime }: ApiKey, now = Date.now()): KeyState {
  if (revokeTime) {
    return 'revoked';
  }
  if (expireTime && date(expireTime).getTime() <= now) {
    return 'expired';
  }
  return retireTime ? 'replaced' : 'valid';
}

/** Whether a key still authenticates calls. */
export function isUsable(key: ApiKey, now = Date.now()): boolean {
  const state = keyState(key, now);
  return (
    state === 'valid' || (state === 'replaced' && key.retireTime !== undefined && date(key.retireTime).getTime() > now)
  );
}
