"""Tests of uploading a saved checkpoint to a hub."""

from pathlib import Path

import pytest

from fixtures.fake_hub import running_hub
from twinkle.data_format import LoraConfig
from twinkle.hub import HubError
from twinkle.model import TransformersModel


@pytest.fixture
def trainer(tiny_llama_dir: Path) -> TransformersModel:
    """Model with one adapter."""
    model = TransformersModel(str(tiny_llama_dir))
    model.add_adapter_to_model('default', LoraConfig(r=2))
    return model


@pytest.mark.parametrize('async_upload', [True, False])
def test_upload_omits_the_state_for_resuming(
    trainer: TransformersModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, async_upload: bool
) -> None:
    """An upload omits the trainer state and the marker file; without `async_upload`, it is complete on return."""
    # Only small files are used, because the hub's client uploads weights with another protocol.
    for name in ('adapter_config.json', 'trainer_state.safetensors', '.unfinished.json'):
        (tmp_path / name).write_text('{}')
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        monkeypatch.setenv('HF_TOKEN', 'hf_right')
        uploading = trainer.upload_to_hub(str(tmp_path), 'hf://org/name', async_upload=async_upload)
        assert async_upload or uploading.done()
        assert uploading.result().url == f'{hub.url}/org/name'
        assert list(hub.files['org/name']) == ['adapter_config.json']


def test_invalid_uploads_are_refused_immediately(
    trainer: TransformersModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown adapter, a missing folder, a missing token and an invalid repository are refused immediately."""
    monkeypatch.delenv('HF_TOKEN', raising=False)
    folder = trainer.save('final', str(tmp_path))
    for checkpoint_dir, target, token in (
        (str(tmp_path / 'nowhere'), 'hf://org/name', 'hf_right'),
        (folder, 'hf://org/name', None),
        (folder, 'org/name', 'hf_right'),
    ):
        with pytest.raises(HubError):
            trainer.upload_to_hub(checkpoint_dir, target, token)
    monkeypatch.setenv('HF_TOKEN', 'hf_right')
    monkeypatch.delenv('MODELSCOPE_API_TOKEN', raising=False)
    with pytest.raises(HubError):
        trainer.upload_to_hub(folder, 'ms://org/name')
    with pytest.raises(KeyError):
        trainer.upload_to_hub(folder, 'hf://org/name', 'hf_right', adapter_name='other')
