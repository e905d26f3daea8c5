// The path of a small curve without axes.

export interface Size {
  width: number;
  height: number;
  margin: number;
}

/** Path data of a curve that fills the size. Non-finite values interrupt the curve. Empty without finite values. */
export function sparkPath(steps: number[], values: number[], { width, height, margin }: Size): string {
  const finite = values.filter(Number.isFinite);
  const scale = (minimum: number, maximum: number, length: number) => (value: number) =>
    margin + (length - 2 * margin) * (maximum > minimum ? (value - minimum) / (maximum - minimum) : 0.5);
  const x = scale(steps[0] ?? 0, steps.at(-1) ?? 0, width);
  const y = scale(Math.min(...finite), Math.max(...finite), height);
  let verb = 'M';
  return values
    .map((value, index) => {
      const step = steps[index];
      if (!Number.isFinite(value) || step === undefined) {
        verb = 'M';
        return '';
      }
      const point = `${verb}${x(step).toFixed(1)} ${(height - y(value)).toFixed(1)}`;
      verb = 'L';
      return point;
    })
    .join('');
}
