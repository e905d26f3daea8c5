import { create } from '@bufbuild/protobuf';
import { expect, test } from 'vitest';
import { MessageSchema, Role } from 'twinkle-grpc/api/data/v1/message_pb';
import { turnOf } from './chats';

test('a turn has its text, names of other parts, calls of tools, and reasoning', () => {
  const message = create(MessageSchema, {
    role: Role.ASSISTANT,
    parts: [{ part: { case: 'text', value: 'See ' } }, { part: { case: 'image', value: { mediaType: 'image/png' } } }],
    toolCalls: [{ name: 'add', arguments: { a: 1, b: 2 } }],
    reasoningContent: 'first the sum',
  });
  expect(turnOf(message)).toEqual({
    role: 'assistant',
    text: 'See [image]\nadd({"a":1,"b":2})',
    reasoning: 'first the sum',
  });
});
