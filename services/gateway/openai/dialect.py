"""Errors as OpenAI's API tells them: `{"error": {message, type, param, code}}`, with our reason beside."""

import re
from typing import Any

from services.kit.errors import Code, DomainError

_STATUSES = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.DEADLINE_EXCEEDED: 408,
    Code.ABORTED: 409,
    Code.ALREADY_EXISTS: 409,
    Code.CANCELLED: 409,
    Code.FAILED_PRECONDITION: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
}
_TYPES = {401: 'authentication_error', 403: 'permission_error', 429: 'rate_limit_error'}
_CODES = {
    'CREDENTIALS_MISSING': 'invalid_api_key',
    'CREDENTIALS_INVALID': 'invalid_api_key',
    'BASE_MODEL_NOT_FOUND': 'model_not_found',
    'ADAPTER_NOT_FOUND': 'model_not_found',
    'VERSION_NOT_FOUND': 'model_not_found',
    'CHECKPOINT_NOT_FOUND': 'model_not_found',
    'RUN_NOT_FOUND': 'model_not_found',
    'CONTEXT_EXCEEDED': 'context_length_exceeded',
    'QUEUE_FULL': 'rate_limit_exceeded',
    'QUOTA_EXCEEDED': 'insufficient_quota',
}
_PARAMS = (
    (r'params\.sample_count', 'n'),
    (r'params\.stop_strings', 'stop'),
    (r'params\.is_eos_ignored', 'ignore_eos'),
    (r'params\.structured_output.*', 'response_format'),
    (r'params\.(prompt_)?top_logprob_count', 'top_logprobs'),
    (r'params\.', ''),
    (r'prompt\.chat\.trajectory\.messages', 'messages'),
    (r'prompt\.chat.*', 'messages'),
    (r'prompt\..*', 'prompt'),
    (r'(base_model|adapter)\b.*', 'model'),
)
"""Where a sampler's field begins so, the parameter that it came from."""


class OpenAiDialect:
    """Implements `call.Dialect`."""

    def status_of(self, error: DomainError) -> int:
        """Return the HTTP status."""
        return 413 if error.reason == 'MESSAGE_TOO_LARGE' else _STATUSES.get(error.code, 500)

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        """Return what is told."""
        status = self.status_of(error)
        param, message = _param_and_message(error)
        kind = 'server_error' if status >= 500 else _TYPES.get(status, 'invalid_request_error')
        return {
            'error': {
                'message': message,
                'type': kind,
                'param': param,
                'code': _CODES.get(error.reason, error.reason.lower()),
                'reason': error.reason,
                'metadata': dict(error.metadata()),
                'request_id': request_id,
            }
        }


def _param_and_message(error: DomainError) -> tuple[str | None, str]:
    if error.violations:
        param = param_of(error.violations[0].field)
        return param, f'{param}: {error.violations[0].problem}'
    return ('model' if _CODES.get(error.reason) == 'model_not_found' else None), str(error)


def param_of(field: str) -> str:
    """Return the parameter that a field of the samplers' contract was made of."""
    for pattern, param in _PARAMS:
        if match := re.match(pattern, field):
            return param + field[match.end() :]
    return field
