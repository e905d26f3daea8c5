// The session of the browser. Its key is in an HttpOnly cookie, which scripts cannot read.
import { ApiError } from './failure';

export interface Session {
  tenant_id: string;
  key_id: string;
  scopes: string[];
  expire_time: string;
}

interface ErrorBody {
  error?: { message?: string; reason?: string; field?: string; request_id?: string };
}

/** `undefined` until the server has answered, and `null` without a session. */
export const session = $state<{ current: Session | null | undefined; notice: string }>({
  current: undefined,
  notice: '',
});

async function call(path: string, body?: object): Promise<Response> {
  const request = body
    ? { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) }
    : {};
  const response = await fetch(`/console/api/${path}`, { ...request, cache: 'no-store' });
  if (response.ok) {
    return response;
  }
  const { error = {} } = (await response.json().catch(() => ({}))) as ErrorBody;
  const { message, reason = '', field = '', request_id: requestId = '' } = error;
  throw new ApiError(
    response.status,
    message ?? `The server answered with status ${response.status}.`,
    reason,
    field,
    requestId,
  );
}

/** Asks the server for the session of the cookie. */
export async function resume(): Promise<void> {
  try {
    session.current = (await (await call('session')).json()) as Session;
  } catch (error) {
    session.current = null;
    if (!(error instanceof ApiError && error.status === 401)) {
      throw error;
    }
  }
}

export async function login(credentials: { key: string } | { link: string }): Promise<void> {
  session.current = (await (await call('login', credentials)).json()) as Session;
  session.notice = '';
}

export async function logout(): Promise<void> {
  await call('logout', {});
  session.current = null;
}

/** Returns to the login page, because the server refused the cookie. */
export function expire(): void {
  if (session.current) {
    session.notice = 'The session has ended: it expired, or its key was revoked. Log in again.';
    session.current = null;
  }
}

export const hasScope = (scope: string): boolean => session.current?.scopes.includes(scope) ?? false;

/** The scope if the key lacks it, otherwise an empty text. */
export const missingScope = (scope: string): string => (hasScope(scope) ? '' : scope);
