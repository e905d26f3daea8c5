// The page that the hash of the address names.
import { href, parseHash, type Route, type Values } from './hash';

export const route = $state<{ current: Route }>({ current: parseHash(location.hash) });

addEventListener('hashchange', () => {
  route.current = parseHash(location.hash);
});

/** Replaces the address without a new entry in the browser's history. */
export function replace(path: string[], values: Values = {}): void {
  history.replaceState(null, '', href(path, values));
  route.current = parseHash(location.hash);
}
