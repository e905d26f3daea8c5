"""The page that lists the architecture decision records."""

import re
from pathlib import Path

HEADER = """# Decisions

Each record describes one decision that is hard to reverse: its context, the choice, and what was given up.

| number | decision | date | status |
| --- | --- | --- | --- |
"""
RECORD = re.compile(r'# (\d{4})\. (.*?)\n\nDate: ([\d-]+)\. Status: (.*?)\.\s*\n\n', re.DOTALL)


def decisions_page(folder: Path) -> str:
    """Return the list of the records in a folder, which are named by their number.

    Raises:
        ValueError: A record does not begin like the template.
    """
    rows: list[str] = []
    for path in sorted(folder.glob('[0-9]*.md')):
        if path.name.startswith('0000'):
            continue
        match = RECORD.match(path.read_text(encoding='utf-8'))
        if match is None:
            raise ValueError(f'{path.name}: must begin like 0000-template.md, with a title, a date and a status')
        number, title, date, status = (' '.join(part.split()) for part in match.groups())
        rows.append(f'| {number} | [{title}]({path.name}) | {date} | {status} |')
    return HEADER + '\n'.join(rows) + '\n'
