/** Returns a random id that begins with `prefix` and a dash. The id makes a repeated request idempotent. */
export function newId(prefix: string): string {
  // Pages without TLS have no `crypto.randomUUID`.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return `${prefix}-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, '0')).join('')}`;
}
