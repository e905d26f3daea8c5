// JSON of the data that a page shows. Messages are written as the JSON mapping of protobuf defines it.
import { isMessage, toJson } from '@bufbuild/protobuf';
import { registry } from 'twinkle-grpc/registry';

export function plain(value: unknown): unknown {
  if (isMessage(value)) {
    const schema = registry.getMessage(value.$typeName);
    return schema ? toJson(schema, value, { registry, useProtoFieldName: true }) : null;
  }
  if (Array.isArray(value)) {
    return value.map(plain);
  }
  if (value instanceof Map) {
    return plain(Object.fromEntries(value));
  }
  if (typeof value === 'number' && !Number.isFinite(value)) {
    return `${value}`;
  }
  if (typeof value === 'bigint') {
    return `${value}`;
  }
  if (typeof value === 'object' && value !== null) {
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, plain(item)]));
  }
  return value;
}

export const pretty = (value: unknown): string => JSON.stringify(plain(value), null, 2);
