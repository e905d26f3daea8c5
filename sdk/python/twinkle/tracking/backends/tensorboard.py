"""TensorBoard's event files as a backend. The backend needs neither torch nor TensorFlow."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twinkle.tracking.backends.packages import required
from twinkle.tracking.delivery import Status
from twinkle.tracking.run import TrackedRun


class TensorboardBackend:
    """Writes event files; `tensorboard --logdir runs` shows them.

    TensorBoard stores numbers as float32. The description of the run is a text with the tag 'run'. A continued run
    writes another file in its folder, and a repeated step is stored twice. Neither a status nor rollouts are stored.

    Args:
        folder: Folder of the run.

    Raises:
        MissingLibrary: tensorboard is not installed.
    """

    name = 'tensorboard'

    def __init__(self, folder: Path) -> None:
        self._writers = required('tensorboard', module='tensorboard.summary.writer.event_file_writer')
        self._events = required('tensorboard', module='tensorboard.compat.proto.event_pb2')
        self._summaries = required('tensorboard', module='tensorboard.compat.proto.summary_pb2')
        self._tensors = required('tensorboard', module='tensorboard.compat.proto.tensor_pb2')
        self._types = required('tensorboard', module='tensorboard.compat.proto.types_pb2')
        self._texts = required('tensorboard', module='tensorboard.plugins.text.metadata')
        self._folder = folder
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        self._writer = self._writers.EventFileWriter(str(self._folder))
        described = {'run_id': run.run_id, 'name': run.name, 'tags': run.tags, 'config': run.config}
        text = f'```json\n{json.dumps(described, indent=2)}\n```'
        value = self._summaries.Summary.Value(
            tag='run',
            metadata=self._texts.create_summary_metadata(display_name='run', description=''),
            tensor=self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()]),
        )
        self._write(value, step=0)

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        numbers = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(*numbers, step=step)

    def finish(self, status: Status) -> None:
        del status
        self._writer.close()

    def _write(self, *values: Any, step: int) -> None:
        summary = self._summaries.Summary(value=values)
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), summary=summary))
        self._writer.flush()
