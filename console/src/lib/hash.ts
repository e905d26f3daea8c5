// Addresses of pages in the hash: "#/runs/RUN/operations?key=value".

export interface Route {
  /** Parts of the path. Empty for the start page. */
  path: string[];
  query: URLSearchParams;
}

export function parseHash(hash: string): Route {
  const [path = '', query = ''] = hash.replace(/^#\/?/, '').split('?', 2);
  return { path: path.split('/').filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

export type Values = Record<string, string | string[] | undefined>;

/** Address of a page. Empty values are omitted; a list repeats its key. */
export function href(path: string[], values: Values = {}): string {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) {
    for (const item of [value ?? []].flat().filter(Boolean)) {
      query.append(key, item);
    }
  }
  const text = query.toString();
  return `#/${path.map(encodeURIComponent).join('/')}${text && `?${text}`}`;
}
