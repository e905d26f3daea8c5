"""What is kept with a future so that its outcome can be told in Tinker's words when its request is gone."""

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.gateway.futures.rules import Future

CREATE, EXECUTE, DELETE = 'create_adapter', 'execute', 'delete_adapter'
"""Kinds of futures that training submits: which native request they carry."""


class Verb(StrEnum):
    """What a client asked for."""

    CREATE_MODEL = 'create_model'
    LOAD_MODEL = 'load_model'
    """A model is made of saved weights."""
    FORWARD = 'forward'
    FORWARD_BACKWARD = 'forward_backward'
    OPTIM_STEP = 'optim_step'
    SAVE_WEIGHTS = 'save_weights'
    SAVE_FOR_SAMPLER = 'save_weights_for_sampler'
    PUBLISH = 'publish'
    """Weights are saved for a sampling session of their own, without a name."""
    SAVE_EXTERNAL = 'save_weights_external'
    LOAD_WEIGHTS = 'load_weights'
    UNLOAD_MODEL = 'unload_model'


@dataclass(frozen=True)
class Note:
    """A future's note."""

    verb: str
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Whatever else the answer needs: short JSON values."""

    def __str__(self) -> str:
        return json.dumps({'verb': self.verb, **self.facts}, separators=(',', ':'), sort_keys=True)


def note_of(future: Future) -> Note:
    """Return the note of a future; one of another API's has the empty verb."""
    try:
        facts = json.loads(future.note)
    except ValueError:
        return Note('')
    return Note(str(facts.pop('verb', '')), facts) if isinstance(facts, dict) else Note('')  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]
