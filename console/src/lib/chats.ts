// Conversion of chat messages to text.
import { type ContentPart, type Message, Role } from 'twinkle-grpc/api/data/v1/message_pb';
import { lower } from './format';
import { plain } from './json';

export interface Turn {
  /** "system", "user", "assistant" or "tool". */
  role: string;
  text: string;
  /** Empty if the message has no reasoning. */
  reasoning: string;
}

/** Text of a part of a message, or the kind of a part that is not text. */
const partText = ({ part }: ContentPart): string => (part.case === 'text' ? part.value : `[${part.case ?? 'empty'}]`);

export const turnOf = ({ role, parts, toolCalls, reasoningContent }: Message): Turn => ({
  role: lower(Role[role]),
  text: [
    ...(parts.length ? [parts.map(partText).join('')] : []),
    ...toolCalls.map((call) => `${call.name}(${JSON.stringify(plain(call.arguments ?? {}))})`),
  ].join('\n'),
  reasoning: reasoningContent,
});
