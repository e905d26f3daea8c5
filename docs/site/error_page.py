"""The page of error reasons: the cause from the contract, and the services' messages, which contain the solution."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from google.rpc import code_pb2, status_pb2

from docs.site.contracts import Contract
from twinkle_client.errors import error_from_status

_INTRODUCTION = """# Error reasons

A failed call returns a `google.rpc.Status` whose first detail is a `google.rpc.ErrorInfo` with the domain `twinkle` and
one of these reasons. `twinkle_client` raises the exception that each section names, with the reason as `error.reason`,
the details as `error.metadata`, and the id of the call as `error.request_id`.

The metadata key `disposition`, in Python `error.disposition`, states whether the request had an effect:

| disposition | meaning |
| --- | --- |
{dispositions}

"""


def error_page(contracts: list[Contract], root: Path) -> str:
    """Return the page with all reasons."""
    enums = {name: (contract, enum, path) for contract in contracts for name, enum, path in contract.enums()}
    contract, enum, path = enums['Disposition']
    dispositions = [
        f'| `{value.name.removeprefix("DISPOSITION_")}` | {contract.member_comment(path, index)} |'
        for index, value in enumerate(enum.value)
        if value.number
    ]
    lines = [_INTRODUCTION.format(dispositions='\n'.join(dispositions))]
    contract, enum, path = enums['ErrorReason']
    messages = messages_by_reason(root / 'services')
    for index, value in enumerate(enum.value):
        if value.number:
            reason = value.name.removeprefix('ERROR_REASON_')
            lines += _section(reason, contract.member_comment(path, index), messages.get(reason, []))
    return '\n'.join(lines)


def messages_by_reason(services: Path) -> dict[str, list[str]]:
    """Return the message templates of the error classes that `domain_error` declares, by reason."""
    texts = (path.read_text(encoding='utf-8') for path in sorted(services.rglob('*.py')))
    declarations = (
        [item.value for item in node.args if isinstance(item, ast.Constant)]
        for text in texts
        if 'domain_error(' in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == 'domain_error'
    )
    found: dict[str, list[str]] = defaultdict(list)
    for reason, *message in declarations:
        found[str(reason)] += [str(text) for text in message if text not in found[str(reason)]]
    return found


def _section(reason: str, comment: str, messages: list[str]) -> list[str]:
    code, _, cause = comment.partition('. ')
    code, _, detail = code.partition(' ')
    cause, _, metadata = cause.partition('Metadata: ')
    exception = type(error_from_status(status_pb2.Status(code=code_pb2.Code.Value(code)))).__name__
    if detail:
        exception = f'{exception}, or BusyError if there is a retry time'
    lines = [f'## {reason} {{ #{reason.lower()} }}', '', _escape(cause.strip()), '']
    lines += [f'- Status: `{code}`{f" {detail}" if detail else ""}', f'- Python: `{exception}`']
    if metadata and not metadata.startswith('none'):
        lines.append(f'- Metadata: {_escape(metadata)}')
    # A template that is only one field repeats a text that the service composes.
    shown = [message for message in messages if not re.fullmatch(r'{\w+}', message)]
    lines += [f'- Message: "{_escape(_readable(message))}"' for message in shown]
    return [*lines, '']


def _readable(template: str) -> str:
    """Replace the fields of a message template by their names: `{adapter_id!r}` becomes `<adapter id>`."""
    return re.sub(r'{(\w+)[^}]*}', lambda match: f'<{match[1].replace("_", " ")}>', template)


def _escape(text: str) -> str:
    return text.replace('<', '&lt;').replace('[', '\\[')
