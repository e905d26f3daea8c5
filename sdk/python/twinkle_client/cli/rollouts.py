"""`twinkle run rollouts`: the rollouts of a training run as tables, or a single rollout as text."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

from twinkle_client.cli.session import (
    StateDirOption,
    console,
    error_console,
    open_client,
    print_rows,
    print_table,
)
from twinkle_client.rollouts import LoggedRollout, RolloutGroup, RolloutSummary, RunRollouts

_EMPTY = 'no rollouts; programs log them with model.rollouts().log(responses, step=..., rewards=...)'


def rollouts(
    run: Annotated[str, typer.Argument(help='Run id, as printed by `twinkle runs`.')],
    step: Annotated[int | None, typer.Option(help='Show only this step, with each rollout.', min=0)] = None,
    rollout: Annotated[
        str | None, typer.Option(help='Show one rollout with its text: STEP/GROUP/INDEX, as listed with --step.')
    ] = None,
    limit: Annotated[int, typer.Option(help='Maximum number of groups to show, newest steps first.', min=1)] = 50,
    is_json: Annotated[bool, typer.Option('--json', help='Print JSON; with --rollout, with all tokens.')] = False,
    state_dir: StateDirOption = None,
) -> None:
    """List groups of rollouts with the statistics of their rewards, or show one rollout."""
    with open_client(state_dir) as client, error_console.status('loading the rollouts'):
        logged = RunRollouts(run, client=client)
        if rollout is not None:
            found: Any = logged.get(rollout)
        else:
            end = None if step is None else step + 1
            found = logged.list(begin_step=step or 0, end_step=end, limit=limit)
    if is_json:
        typer.echo(json.dumps(_json_value(found if rollout is not None else {'run': run, 'groups': found})))
    elif rollout is not None:
        _print_rollout(found)
    else:
        print_rows(_groups_table(found), empty=_EMPTY)
        if step is not None and found:
            print_table(_rollouts_table(found))


def _groups_table(groups: Sequence[RolloutGroup]) -> Table:
    """Return a table with a row for each group; groups whose rewards are all equal are marked."""
    table = _with_text(Table('step', 'group', 'rollouts', 'mean', 'min', 'max', 'equal', 'prompt'))
    for group in groups:
        statistics = group.reward
        numbers = (statistics.mean, statistics.minimum, statistics.maximum)
        texts = [f'{number:.4g}' if statistics.count else '' for number in numbers]
        mark = '[yellow]equal[/yellow]' if group.is_degenerate else ''
        prompt = _one_line(group.rollouts[0].prompt_preview)
        table.add_row(str(group.step), escape(group.group_id), str(len(group.rollouts)), *texts, mark, prompt)
    return table


def _rollouts_table(groups: Sequence[RolloutGroup]) -> Table:
    table = _with_text(Table('rollout', 'reward', 'advantage', 'tokens', 'versions', 'end', 'completion'))
    for group in groups:
        for rollout in group.rollouts:
            numbers = (_number(rollout.reward), _number(rollout.advantage), _number(rollout.completion_token_count))
            facts = (*numbers, _versions(rollout), escape(rollout.finish_reason))
            table.add_row(escape(rollout.rollout_id), *facts, _one_line(rollout.completion_preview))
    return table


def _with_text(table: Table) -> Table:
    """Give the last column, which has the beginning of a text, the rest of the terminal's width."""
    table.expand = True
    text = table.columns[-1]
    text.ratio, text.no_wrap, text.overflow = 1, True, 'ellipsis'
    return table


def _print_rollout(rollout: LoggedRollout) -> None:
    """Print the facts of a rollout, its prompt and its completion."""
    facts = [f'{rollout.rollout_id}: reward {_number(rollout.reward) or "unknown"}']
    facts += [f'{name} {value:.4g}' for name, value in rollout.reward_parts.items()]
    facts += [f'advantage {_number(rollout.advantage)}'] if rollout.advantage is not None else []
    facts += [f'{len(rollout.token_ids)} tokens'] if rollout.token_ids is not None else []
    if rollout.logprobs is not None and not np.isnan(rollout.logprobs).all():
        facts.append(f'mean log-probability {np.nanmean(rollout.logprobs):.4g}')
    facts += [f'ended by {rollout.finish_reason}'] if rollout.finish_reason else []
    _print(', '.join(facts))
    for span in rollout.version_spans:
        _print(f'tokens {span.begin_token} to {span.end_token - 1}: version {span.version}')
    chat: Sequence[Any] = (rollout.prompt_chat or {}).get('messages') or []
    _print_part('prompt', chat, rollout.prompt_text)
    _print_part('completion', rollout.completion_messages, rollout.completion_text)


def _print_part(title: str, messages: Sequence[Any], text: str) -> None:
    console.rule(title, align='left')
    for message in messages:
        for call in message.get('tool_calls') or ():
            _print(f'[{message["role"]}] calls {json.dumps(call["function"], ensure_ascii=False)}')
        content = message.get('content')
        if content:
            _print(f'[{message["role"]}] {content if isinstance(content, str) else json.dumps(_json_value(content))}')
    if text:
        _print(text)


def _versions(rollout: RolloutSummary) -> str:
    if rollout.oldest_version is None or rollout.oldest_version == rollout.newest_version:
        return _number(rollout.oldest_version)
    return f'{rollout.oldest_version}-{rollout.newest_version}'


def _number(value: float | None) -> str:
    return '' if value is None else f'{value:.6g}'


def _one_line(text: str) -> str:
    return escape(' '.join(_printable(text).split()))


def _print(text: str) -> None:
    console.print(_printable(text), markup=False, highlight=False, soft_wrap=True)


def _printable(text: str) -> str:
    """Return text with visible control characters, because a model can sample codes that change the terminal."""
    shown = (mark if mark.isprintable() or mark in '\n\t' else mark.encode('unicode_escape').decode() for mark in text)
    return ''.join(shown)


def _json_value(value: Any) -> Any:
    """Return a value for JSON, in which numbers that are not finite are text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _json_value(item) for name, item in cast('Mapping[Any, Any]', value).items()}
    convert_array = getattr(value, 'tolist', None)
    if convert_array is not None:
        return _json_value(convert_array())
    if isinstance(value, list | tuple):
        return [_json_value(item) for item in cast('Sequence[Any]', value)]
    if isinstance(value, datetime | bytes):
        return value.isoformat() if isinstance(value, datetime) else f'{len(value)} bytes'
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
