// The token texts of a base model, which never change.
import type { TokenForm } from 'twinkle-grpc/api/sampler/v1/sampling_pb';
import { sampler } from './rpc';
import { int32Tensor } from 'twinkle-grpc';

const MAX_TOKENS = 65_536;

export class Vocabulary {
  readonly #forms = new Map<number, TokenForm>();

  constructor(readonly baseModel: string) {}

  /** Reads the forms of tokens that were not loaded before. */
  async load(ids: number[], signal: AbortSignal): Promise<void> {
    const unknown = [...new Set(ids)].filter((id) => !this.#forms.has(id));
    for (let begin = 0; begin < unknown.length; begin += MAX_TOKENS) {
      const part = unknown.slice(begin, begin + MAX_TOKENS);
      const request = { baseModel: this.baseModel, tokenIds: int32Tensor(part) };
      const { tokens } = await sampler.describeTokens(request, { signal });
      tokens.forEach((form, index) => this.#forms.set(part[index] ?? -1, form));
    }
  }

  /** Form of a token that was loaded. */
  form(id: number): TokenForm | undefined {
    return this.#forms.get(id);
  }

  /** Text of a single token. Incomplete characters become replacement characters. */
  text(id: number): string {
    return new TextDecoder().decode(this.form(id)?.piece);
  }
}

const vocabularies = new Map<string, Vocabulary>();

export function vocabularyOf(baseModel: string): Vocabulary {
  const vocabulary = vocabularies.get(baseModel) ?? new Vocabulary(baseModel);
  vocabularies.set(baseModel, vocabulary);
  return vocabulary;
}

/** Decodes consecutive tokens. A character that several tokens form is the text of the last of these tokens. */
export class TokenDecoder {
  readonly #decoder = new TextDecoder();

  constructor(readonly vocabulary: Vocabulary) {}

  next(id: number): { text: string; isSpecial: boolean } {
    const form = this.vocabulary.form(id);
    const isSpecial = form?.isSpecial ?? false;
    return {
      text: isSpecial ? this.vocabulary.text(id) : this.#decoder.decode(form?.piece, { stream: true }),
      isSpecial,
    };
  }
}
