"""Error format of the Tinker API: a status and `{"detail": text}`, or a category in a future.

The SDK raises immediately on 400, 401, 403, 404, 410, 413 and 422, and retries for minutes on 408, 409, 429 and from
500 on. These statuses are used only when a retry can succeed: a permanent conflict is a 400.
"""

import re
from typing import Any

from services.kit.errors import Code, DomainError

_STATUSES = {
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.DEADLINE_EXCEEDED: 408,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.INTERNAL: 500,
    Code.UNKNOWN: 500,
    Code.DATA_LOSS: 500,
}
"""All other codes are 400: a retry cannot succeed."""
_REASONS = {
    'MESSAGE_TOO_LARGE': 413,
    'SESSION_FINISHED': 410,
    'FUTURE_EXPIRED': 410,
}
"""Reasons with a more specific status than their code."""
_SERVER_CODES = frozenset({Code.UNAVAILABLE, Code.INTERNAL, Code.DATA_LOSS, Code.DEADLINE_EXCEEDED})
_FIELDS = (
    (r'(operation\.)?forward_(backward|only)\.batch\.features', 'data'),
    (r'(operation\.)?forward_(backward|only)\.loss', 'loss_fn'),
    (r'(operation\.)?clip_grad_and_step', 'adam_params'),
    (r'(operation\.)?save\.name', 'path'),
    (r'((operation\.)?load\.)?checkpoint_path', 'path'),
    (r'lora_config\.lora_rank', 'lora_config.rank'),
    (r'(operation\.)?adapter_id', 'model_id'),
    (r'params(?=\.)', 'sampling_params'),
    (r'prompts\[0\]', 'prompt'),
)
"""Patterns of native fields, and the fields of Tinker's requests that they are converted from."""
_TENSORS = {
    'labels': 'target_tokens',
    'target_ids': 'target_tokens',
    'loss_weights': 'weights',
    'target_weights': 'weights',
    'old_logps': 'logprobs',
    'input_ids': 'model_input',
}


class TinkerErrors:
    """Error responses of the Tinker API."""

    def status_of(self, error: DomainError) -> int:
        """Return the HTTP status."""
        if error.reason in _REASONS:
            return _REASONS[error.reason]
        if error.code is Code.RESOURCE_EXHAUSTED and not error.disposition.is_transient:
            return 400
        return _STATUSES.get(error.code, 400)

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        """Return the JSON body."""
        return {'detail': text_of(error), 'reason': error.reason, 'request_id': request_id}


def text_of(error: DomainError) -> str:
    """Return the message of an error, with Tinker's field names."""
    if error.reason == 'CREDENTIALS_MISSING':
        return 'send an API key in the header X-API-Key'
    if error.violations:
        return f'{field_of(error.violations[0].field)}: {error.violations[0].problem}'
    return str(error) or error.reason


def category_of(error: DomainError) -> str:
    """Return who caused a future to fail: 'user', 'server' or 'unknown'."""
    if error.code in _SERVER_CODES:
        return 'server'
    return 'unknown' if error.code in {Code.UNKNOWN, Code.CANCELLED} else 'user'


def field_of(field: str) -> str:
    """Return the field of Tinker's request that a native field is converted from."""
    for pattern, name in _FIELDS:
        if match := re.match(pattern, field):
            field = name + field[match.end() :]
            break
    head, dot, tail = field.rpartition('.')
    name = re.sub(r"^extra_tensors\[?['\"]?(\w+)['\"]?\]?$", r'\1', tail)
    return f'{head}{dot}{_TENSORS.get(name, name)}'
