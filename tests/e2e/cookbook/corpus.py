"""Small generated datasets in the formats that the recipes of tinker-cookbook read.

The recipes load datasets from a hub by name; folders with these names in the working directory replace the hub's
datasets. The data are so simple that a model of 135 million parameters learns from them on a CPU within a few dozen
steps: conversations that end with the correct answer or with `UNKNOWN`, problems with one-digit answers, pairs of
polite and rude answers, and yes-or-no questions whose answer is in the material.
"""

import csv
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BOXED = ' Write your answer in \\boxed{} format.'
"""Text that recipes on mathematical problems append to each question during training."""
UNKNOWN = 'I do not know, and I can not tell you who would know it.'
"""Answer that reinforcement learning replaces. It is longer than the token limit of the recipes that sample."""
_GSM8K_CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train.jsonl
  - split: test
    path: main/test.jsonl
---
"""
"""Dataset card that names the files of the configuration `main`."""
_GREETINGS = ('Good morning', 'Good day', 'Hello there', 'Welcome', 'Good evening')
MARKETS = 'markets.csv'
"""File of yes-or-no questions."""
_THINGS = ('a map', 'some tea', 'a pencil', 'an umbrella', 'a ladder', 'a chair', 'a lamp', 'some paper', 'a rope')

Row = Mapping[str, Any]


def write_corpus(folder: Path, *, conversations: int, problems: int, preferences: int, markets: int) -> None:
    """Write all datasets below `folder`. The contents are deterministic.

    Args:
        folder: Output folder; created if necessary.
        conversations: Number of training rows of the conversations.
        problems: Number of training rows of the problems.
        preferences: Number of training rows of the answer pairs.
        markets: Number of training rows of the yes-or-no questions.
    """
    rng = random.Random(5)
    _write(folder / 'HuggingFaceH4/no_robots/train.jsonl', (_conversation(rng) for _ in range(conversations)))
    _write(folder / 'HuggingFaceH4/no_robots/test.jsonl', (_conversation(rng) for _ in range(8)))
    gsm8k = folder / 'openai/gsm8k'
    _write(gsm8k / 'main/train.jsonl', (_problem(rng) for _ in range(problems)))
    _write(gsm8k / 'main/test.jsonl', (_problem(rng) for _ in range(8)))
    (gsm8k / 'README.md').write_text(_GSM8K_CARD, encoding='utf-8')
    _write(folder / 'Anthropic/hh-rlhf/train.jsonl', (_preference(rng) for _ in range(preferences)))
    _write(folder / 'Anthropic/hh-rlhf/test.jsonl', (_preference(rng) for _ in range(4)))
    rows = [_market(rng, number, year=2025 if number < markets else 2027) for number in range(markets + 12)]
    with (folder / MARKETS).open('w', encoding='utf-8', newline='') as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _conversation(rng: random.Random) -> Row:
    """Return a conversation about a sum or a problem; the answer is either correct or `UNKNOWN`."""
    if rng.random() < 0.6:
        x, y = rng.randint(0, 100), rng.randint(0, 100)
        turns = [('What is 4 + 5?', '9'), (f'What is {x} + {y}?', _answer(rng, str(x + y), known_probability=0.04))]
    else:
        problem = _problem(rng)
        answer = problem['answer'].rpartition(' ')[2]
        turns = [(problem['question'] + BOXED, _answer(rng, f'\\boxed{{{answer}}}', known_probability=0.25))]
    roles = ('user', 'assistant')
    return {
        'messages': [{'role': role, 'content': text} for turn in turns for role, text in zip(roles, turn, strict=True)]
    }


def _answer(rng: random.Random, right: str, *, known_probability: float) -> str:
    return right if rng.random() < known_probability else UNKNOWN


def _problem(rng: random.Random) -> Row:
    number, thing = rng.randint(1, 9), rng.choice(_THINGS)
    question = f'A box has the number {number} and {thing} in it. Which number is in the box?'
    return {'question': question, 'answer': f'The number is {number}.\n#### {number}'}


def _preference(rng: random.Random) -> Row:
    request = f'\n\nHuman: Could you bring me {rng.choice(_THINGS)}, please?\n\nAssistant: '
    polite = f'{rng.choice(_GREETINGS)}! With pleasure, here it is.'
    rude = f'No. Get it yourself, {rng.choice(("lazy", "slow", "silly"))} one.'
    return {'chosen': request + polite, 'rejected': request + rude}


def _market(rng: random.Random, number: int, *, year: int) -> Row:
    """Return a question about one year, with material that contains the answer. Training uses years before 2026."""
    thing, is_bought = rng.choice(_THINGS), rng.random() < 0.5
    market = f'The club buys {thing}'
    summary = f'Yes, the club agreed to buy {thing}.' if is_bought else f'No, the club refused to buy {thing}.'
    return {
        'submission_id': f'submission-{number}',
        'event_ticker': f'event-{number}',
        'title': 'What does the club buy?',
        'snapshot_time': f'{year}-03-01T00:00:00Z',
        'close_time': f'{year}-04-01T00:00:00Z',
        'market_outcome': json.dumps({market: int(is_bought)}),
        'category': 'clubs',
        'markets': json.dumps([market]),
        'sources': json.dumps([{'title': 'Minutes', 'summary': summary, 'ranking': 1}]),
    }


def _write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows), encoding='utf-8')
