"""A vLLM scheduler that logs the sampled tokens of each step of the engine core, for measurements and tests.

The engine arguments `scheduler_cls=SCHEDULER` and `additional_config={'step_log': path}` enable the scheduler. It runs
in the engine core and schedules like vLLM's default scheduler.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

SCHEDULER = 'twinkle.sampler.vllm.step_log.StepLog'
"""Import path of the scheduler for vLLM."""


@dataclass(frozen=True)
class Step:
    """One step of the engine core."""

    at: float
    """Time at which the tokens of the step were known, in seconds of `time.monotonic`. All processes of a machine share
    this clock."""
    steps_since: Mapping[str, int]
    """Number of steps since the previous token, by id of each sequence with a new token. It is 0 for the first
    token of a sequence and for the first token after a preemption."""
    preempted: tuple[str, ...]
    """Ids of the sequences that were preempted in this step: vLLM freed their caches, and will compute them again."""


class StepLog(AsyncScheduler):
    """Schedules like its base class and appends a line to a file after each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._file = Path(self.vllm_config.additional_config['step_log']).open('a', encoding='utf-8')  # noqa: SIM115
        self._step_number = 0
        self._sampled_at: dict[str, int] = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process the tokens of a step and log them."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._step_number += 1
        preempted = tuple(scheduler_output.preempted_req_ids or ())
        for name in preempted:
            self._sampled_at.pop(name, None)
        produced = [output for each in outputs.values() for output in each.outputs]
        steps_since = {
            output.request_id: self._record(output.request_id) for output in produced if output.new_token_ids
        }
        for output in produced:
            if output.finish_reason is not None:
                self._sampled_at.pop(output.request_id, None)
        self._file.write(json.dumps(asdict(Step(time.monotonic(), steps_since, preempted))) + '\n')
        self._file.flush()
        return outputs

    def _record(self, name: str) -> int:
        """Record a new token of a sequence; return the value for `Step.steps_since`."""
        last = self._sampled_at.get(name, self._step_number)
        self._sampled_at[name] = self._step_number
        return self._step_number - last


def read_steps(path: Path) -> Iterator[Step]:
    """Yield the steps in a file, in order."""
    for line in path.read_text(encoding='utf-8').splitlines():
        values = json.loads(line)
        yield Step(values['at'], values['steps_since'], tuple(values['preempted']))
