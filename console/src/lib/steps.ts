// The steps of a dataset's recipe as text.
import { type DatasetStep, TruncationStrategy } from 'twinkle-grpc/api/data/v1/dataset_pb';
import { lower } from './format';
import { plain } from './json';

const call = (name: string, args: object | undefined): string =>
  Object.keys(args ?? {}).length ? `${name} ${JSON.stringify(plain(args))}` : name;

export function stepText({ step }: DatasetStep): string {
  switch (step.case) {
    case 'map':
      return `Map with ${call(step.value.preprocessor, step.value.initArgs)}`;
    case 'filter':
      return `Filter with ${call(step.value.filter, step.value.initArgs)}`;
    case 'setTemplate': {
      const { name, baseModel, maxLength, truncationStrategy } = step.value;
      const strategy = lower(TruncationStrategy[truncationStrategy || TruncationStrategy.RAISE]);
      return `Set the template ${name || 'Template'} of ${baseModel}: at most ${maxLength ?? 8192} tokens, longer examples: ${strategy}`;
    }
    case 'encode':
      return step.value.isGenerationPromptAdded ? 'Encode as prompts' : 'Encode';
    case 'pack':
      return 'Pack';
    case 'check':
      return 'Check labels';
    default:
      return 'Step that this console does not know';
  }
}

/** Model whose tokenizer encoded the rows. Empty if there is no template. */
export const templateModel = (steps: DatasetStep[]): string =>
  steps.map(({ step }) => (step.case === 'setTemplate' ? step.value.baseModel : '')).findLast(Boolean) ?? '';
