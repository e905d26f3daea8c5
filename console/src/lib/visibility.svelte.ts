// Whether the page is visible. Hidden pages do not poll and close their streams: browsers limit the connections to a
// server.

export const visibility = $state({ isVisible: !document.hidden });

const waiting = new Set<() => void>();

document.addEventListener('visibilitychange', () => {
  visibility.isVisible = !document.hidden;
  if (visibility.isVisible) {
    waiting.forEach((resume) => resume());
    waiting.clear();
  }
});

/** Resolves when the page is visible. */
export async function untilVisible(): Promise<void> {
  if (document.hidden) {
    await new Promise<void>((resume) => waiting.add(resume));
  }
}
