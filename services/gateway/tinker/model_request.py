"""What model is asked for: fresh, or of saved weights."""

from dataclasses import dataclass
from typing import Any

from services.gateway.http.fields import flag, text, whole
from services.gateway.tinker.fields import Fields, bounded_text
from services.gateway.tinker.paths import WeightsPath
from services.gateway.tinker.runs import model_id_of
from services.gateway.tinker.session_routes import labels_of
from services.gateway.tinker.training_routes import ADAM, LEARNING_RATE
from services.gateway.tinker.weights_routes import training_path
from services.kit.errors import InvalidField
from services.kit.rpc.json_values import struct_of
from twinkle.api.model.v1 import adapter_service_pb2, training_config_pb2

LORA_RANK = 32
LORA_ALPHA = 32.0
"""Tinker's clients give none; files they take away say this one."""
_GROUPS = {'train_attn': 'all-attention', 'train_mlp': 'all-mlp', 'train_unembed': 'output-head'}
"""Switches, and the groups of layers they stand for."""
_session_id = bounded_text(1, 100)
_model_seq_id = whole(0, (1 << 31) - 1)
_rank = whole(1, 1 << 16)
_seed = whole(-(1 << 63), (1 << 63) - 1)


@dataclass(frozen=True)
class ModelRequest:
    """A model that is asked for."""

    session_id: str
    model_id: str
    base_model: str
    """Empty: that of the saved weights."""
    lora_config: training_config_pb2.LoraConfig | None
    """None: that of the saved weights."""
    labels: dict[str, str]
    path: WeightsPath | None = None
    """Saved weights to begin from."""
    is_optimizer_included: bool = False

    def native(self, base_model: str) -> adapter_service_pb2.CreateAdapterRequest:
        """Return the native request."""
        optimizer = training_config_pb2.OptimizerConfig(
            name='AdamW',
            learning_rate=LEARNING_RATE,
            options=struct_of(
                {'betas': [ADAM['beta1'], ADAM['beta2']], 'eps': ADAM['eps'], 'weight_decay': ADAM['weight_decay']}
            ),
        )
        return adapter_service_pb2.CreateAdapterRequest(
            request_id=self.model_id,
            adapter_id=self.model_id,
            session_id=self.session_id,
            base_model=base_model,
            lora_config=self.lora_config,
            training_config=training_config_pb2.TrainingConfig(optimizer=optimizer),
            user_metadata=self.labels,
            checkpoint_path=self.path.native if self.path else '',
            is_optimizer_included=self.is_optimizer_included,
        )


def fresh_model(body: dict[str, Any], *, is_unembed_trained: bool) -> ModelRequest:
    """Read a request for a model with fresh weights.

    Args:
        body: the request.
        is_unembed_trained: whether `train_unembed` is honoured; otherwise the output head stays as it is.

    Raises:
        InvalidField: a field is wrong.
    """
    fields = Fields(body)
    _check_optimizer(fields)
    return ModelRequest(
        **_identity(fields),
        base_model=fields.need('base_model', bounded_text(1, 256)),
        lora_config=_lora_config(fields.part('lora_config'), is_unembed_trained=is_unembed_trained),
    )


def saved_model(fields: Fields) -> ModelRequest:
    """Read a request for a model that begins from saved weights.

    Raises:
        InvalidField: a field is wrong.
    """
    _check_optimizer(fields)
    if 'weights_access_token' in fields:
        raise InvalidField(
            'weights_access_token', 'is not served; weights of others can be loaded once they publish them'
        )
    return ModelRequest(
        **_identity(fields),
        base_model=fields.get('base_model', bounded_text(1, 256), ''),
        lora_config=None,
        path=training_path(fields),
        is_optimizer_included=fields.get('optimizer', flag, default=False),
    )


def _identity(fields: Fields) -> dict[str, Any]:
    session_id = fields.need('session_id', _session_id)
    model_id = model_id_of(session_id, fields.need('model_seq_id', _model_seq_id))
    return {'session_id': session_id, 'model_id': model_id, 'labels': labels_of(fields, 'user_metadata')}


def _check_optimizer(fields: Fields) -> None:
    kind = fields.part('optimizer_config').get('type', text, 'adamw')
    if kind not in {'adamw', 'adam'}:
        raise InvalidField('optimizer_config.type', f'models are trained with adamw here, not with {kind[:100]!r}')


def _lora_config(fields: Fields, *, is_unembed_trained: bool) -> training_config_pb2.LoraConfig:
    config = training_config_pb2.LoraConfig(
        lora_rank=fields.get('rank', _rank, LORA_RANK),
        lora_alpha=LORA_ALPHA,
        target_modules=_targets(fields, is_unembed_trained=is_unembed_trained),
    )
    if 'seed' in fields:
        config.seed = fields.need('seed', _seed)
    return config


def _targets(fields: Fields, *, is_unembed_trained: bool) -> list[str]:
    """Return the names of the layers that are trained."""
    wanted = {name: fields.get(name, flag, default=True) for name in _GROUPS}
    wanted['train_unembed'] &= is_unembed_trained
    if not any(wanted.values()):
        known = [name for name in _GROUPS if is_unembed_trained or name != 'train_unembed']
        raise InvalidField(fields.path_of('train_mlp'), f'at least one of {", ".join(known)} must be true')
    return [group for name, group in _GROUPS.items() if wanted[name]]
