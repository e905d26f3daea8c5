// The pages of a list: the tokens of the pages before the current one.

export class Paging {
  #tokens = $state<string[]>([]);

  /** Token of the current page. Empty for the first page. */
  get token(): string {
    return this.#tokens.at(-1) ?? '';
  }

  get number(): number {
    return this.#tokens.length + 1;
  }

  next(token: string): void {
    this.#tokens.push(token);
  }

  previous(): void {
    this.#tokens.pop();
  }

  first(): void {
    this.#tokens = [];
  }
}
