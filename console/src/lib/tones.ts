// Colours of tokens, as names of classes in app.css.

/** Level of a token's colour, from 0 (expected) to 4 (surprising). */
export function surprise(logprob: number): number {
  const probability = Math.exp(logprob);
  return [0.9, 0.5, 0.2, 0.05].filter((limit) => !(probability >= limit)).length;
}

/** Colour of a log-probability. Tokens without one were not sampled. */
export const logprobTone = (logprob: number): string =>
  Number.isNaN(logprob) ? 'masked' : `level-${surprise(logprob)}`;

const ADVANTAGE_LEVELS = 3;

/** Colour of an advantage: three levels on each side of 0. `largest` is the largest absolute advantage. */
export function advantageTone(advantage: number, largest: number): string {
  if (!Number.isFinite(advantage)) {
    return 'masked';
  }
  const share = largest > 0 ? Math.abs(advantage) / largest : 0;
  const level = Math.min(Math.ceil(ADVANTAGE_LEVELS * share), ADVANTAGE_LEVELS);
  return level === 0 ? 'level-0' : `${advantage > 0 ? 'positive' : 'negative'}-${level}`;
}
