// The pages of the console, in the order of the navigation.
import type { Component } from 'svelte';
import Administration from './Administration.svelte';
import Data from './Data.svelte';
import Fleet from './Fleet.svelte';
import Overview from './Overview.svelte';
import Playground from './Playground.svelte';
import Runs from './Runs.svelte';
import Traces from './Traces.svelte';
import Usage from './Usage.svelte';

export interface PageEntry {
  path: string;
  title: string;
  /** Scope that the key of the session needs. Unset if any key can open the page. */
  scope?: string;
  /** Reads the rest of the path from the route. */
  component: Component;
}

export const PAGES: PageEntry[] = [
  { path: 'overview', title: 'Overview', component: Overview },
  { path: 'runs', title: 'Runs', component: Runs },
  { path: 'playground', title: 'Playground', scope: 'sample', component: Playground },
  { path: 'data', title: 'Data', scope: 'data', component: Data },
  { path: 'traces', title: 'Traces', component: Traces },
  { path: 'usage', title: 'Usage', component: Usage },
  { path: 'fleet', title: 'Fleet', scope: 'operator', component: Fleet },
  { path: 'admin', title: 'Administration', scope: 'admin', component: Administration },
];

/** The page of a path, or the first page if the session cannot open a page with this path. */
export const pageOf = (path: string[], pages: PageEntry[]): PageEntry =>
  pages.find((page) => page.path === path[0]) ?? (pages[0] as PageEntry);
