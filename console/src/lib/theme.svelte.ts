// The colour scheme: the scheme of the system, or the user's choice.

export type Theme = 'system' | 'light' | 'dark';
const KEY = 'twinkle-console-theme';

const stored = localStorage.getItem(KEY);

/** `colours` changes whenever the colours of the page change, so that canvases are drawn again. */
export const theme = $state<{ choice: Theme; colours: number }>({
  choice: stored === 'light' || stored === 'dark' ? stored : 'system',
  colours: 0,
});

export function applyTheme(choice: Theme = theme.choice): void {
  theme.choice = choice;
  localStorage.setItem(KEY, choice);
  document.documentElement.dataset['theme'] = choice;
  theme.colours += 1;
}

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => {
  theme.colours += 1;
});

/** Value of a colour token, such as "--accent", in the current scheme. */
export function colour(token: string): string {
  const probe = document.createElement('span');
  probe.style.color = `var(${token})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}
