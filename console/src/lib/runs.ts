// Filters of runs, and the conventions for their names and tags.
import { type Run } from 'twinkle-grpc/api/gateway/v1/catalogue_service_pb';

export interface RunFilter {
  text: string;
  baseModel: string;
  /** "active", "ended", or empty for runs in both states. */
  state: string;
  /** Labels as "key=value". */
  tags: string[];
}

const NAME = 'name';

/** The run's label `name`, or its id. */
export const runName = (run: Run): string => run.userMetadata[NAME] || run.runId;

/** The run's other labels, as "key=value". */
export const runTags = (run: Run): string[] =>
  Object.entries(run.userMetadata)
    .filter(([key]) => key !== NAME)
    .map(([key, value]) => `${key}=${value}`)
    .sort();

export const matches = (run: Run, text: string): boolean =>
  [run.runId, run.baseModel, ...Object.values(run.userMetadata)].some((value) => value.toLowerCase().includes(text));

/** The labels of tags of the form "key=value". Other tags are ignored. */
export const labelsOf = (tags: string[]): Record<string, string> =>
  Object.fromEntries(
    tags
      .filter((tag) => tag.indexOf('=') > 0)
      .map((tag) => [tag.slice(0, tag.indexOf('=')), tag.slice(tag.indexOf('=') + 1)]),
  );
