"""Error responses of the OpenAI API."""

import re
from collections.abc import Mapping
from typing import Any

from twinkle_services.gateway.fleet.model_routes import shown_text
from twinkle_services.gateway.http.call import STATUSES
from twinkle_services.kit.errors import Code, DomainError

_TYPES = {401: 'authentication_error', 403: 'permission_error', 429: 'rate_limit_error'}
_CODES = {
    'CREDENTIALS_MISSING': 'invalid_api_key',
    'CREDENTIALS_INVALID': 'invalid_api_key',
    'BASE_MODEL_NOT_FOUND': 'model_not_found',
    'ADAPTER_NOT_FOUND': 'model_not_found',
    'ADAPTER_EXPIRED': 'model_not_found',
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
    (r'prompt\.chat\.trajectory\.(?=messages|tools)', ''),
    (r'prompt\.chat.*', 'messages'),
    (r'prompt\..*', 'prompt'),
    (r'prompts(\[\d+\]).*', r'input\1'),
    (r'(base_model|adapter)\b.*', 'model'),
)
"""Patterns of sampler fields, and the parameters of the HTTP API that the fields are converted from."""
ITEM_PARAMS = {'messages': 'input', 'max_tokens': 'max_output_tokens', 'response_format': 'text.format'}
"""Parameters of `/v1/responses` by the parameter of a chat with the same meaning."""
BLOCK_PARAMS = {'messages': 'messages', 'stop': 'stop_sequences'}
"""Parameters of `/v1/messages` by the parameter of a chat with the same meaning."""


class OpenAiErrors:
    """Error responses of OpenAI's API, `{"error": {message, type, param, code}}`, with additional native fields.

    Args:
        params: parameters of the API by the parameter of a chat with the same meaning. A sampler's error about such a
            parameter does not name a position in it, because the conversion to a chat changes positions.
    """

    def __init__(self, params: Mapping[str, str] | None = None) -> None:
        self._params = params or {}

    def status_of(self, error: DomainError) -> int:
        if error.reason == 'MESSAGE_TOO_LARGE':
            return 413
        if error.code is Code.DATA_LOSS and not error.disposition.is_transient:
            # A repeated call cannot repair damaged weights.
            return 400
        return STATUSES.get(error.code, 500)

    def body_of(self, error: DomainError, *, request_id: str) -> dict[str, Any]:
        status = self.status_of(error)
        param, message = self._param_and_message(error)
        kind = 'server_error' if status >= 500 else _TYPES.get(status, 'invalid_request_error')
        return {
            'error': {
                'message': message,
                'type': kind,
                'param': param,
                'code': _CODES.get(error.reason, error.reason.lower()),
                'reason': error.reason,
                'metadata': {name: shown_text(value) for name, value in error.metadata().items()},
                'request_id': request_id,
            }
        }

    def _param_and_message(self, error: DomainError) -> tuple[str | None, str]:
        if error.violations:
            param = self._param_of(error.violations[0].field)
            return param, f'{param}: {shown_text(error.violations[0].problem)}'
        return ('model' if _CODES.get(error.reason) == 'model_not_found' else None), shown_text(str(error))

    def _param_of(self, field: str) -> str:
        for pattern, param in _PARAMS:
            if match := re.match(pattern, field):
                found = match.expand(param) + field[match.end() :]
                name = re.split(r'\W', found, maxsplit=1)[0]
                return self._params.get(name, found)
        return field
