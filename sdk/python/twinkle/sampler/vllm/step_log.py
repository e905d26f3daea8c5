"""A scheduler of vLLM's that notes what each step of the engine core drew: for measurements, and for tests.

Off unless the engine arguments name it: `scheduler_cls` is `SCHEDULER`, and `additional_config` has the path of a
file as `step_log`. It runs in the engine core and schedules as vLLM's own does. One engine core writes one file.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

SCHEDULER = 'twinkle.sampler.vllm.step_log.StepLog'
"""What vLLM is told to load."""


@dataclass(frozen=True)
class Step:
    """One step of the engine core."""

    at: float
    """When its tokens were known, in seconds of `time.monotonic`, which all processes of a machine share."""
    steps_since: Mapping[str, int]
    """By sequence that a token was drawn for: steps since its last one; 0 where there was none or it was preempted."""
    preempted: tuple[str, ...]
    """Sequences that lost their memory, and will be computed anew."""


class StepLog(AsyncScheduler):
    """Schedules as its base class, and appends a line to a file after each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Open the file that the configuration names."""
        super().__init__(*args, **kwargs)
        self._file = Path(self.vllm_config.additional_config['step_log']).open('a', encoding='utf-8')  # noqa: SIM115
        self._step_number = 0
        self._drawn_at: dict[str, int] = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take the tokens of a step, and note whose they are."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._step_number += 1
        preempted = tuple(scheduler_output.preempted_req_ids or ())
        for name in preempted:
            self._drawn_at.pop(name, None)
        news = [output for each in outputs.values() for output in each.outputs]
        steps_since = {output.request_id: self._note(output.request_id) for output in news if output.new_token_ids}
        for output in news:
            if output.finish_reason is not None:
                self._drawn_at.pop(output.request_id, None)
        self._file.write(json.dumps(asdict(Step(time.monotonic(), steps_since, preempted))) + '\n')
        self._file.flush()
        return outputs

    def _note(self, name: str) -> int:
        """Note that a sequence has a token; return how many steps its last one is ago."""
        last = self._drawn_at.get(name, self._step_number)
        self._drawn_at[name] = self._step_number
        return self._step_number - last


def read_steps(path: Path) -> Iterator[Step]:
    """Yield the steps of a file so far, in their order."""
    for line in path.read_text(encoding='utf-8').splitlines():
        values = json.loads(line)
        yield Step(values['at'], values['steps_since'], tuple(values['preempted']))
