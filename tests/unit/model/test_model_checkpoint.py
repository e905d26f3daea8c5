"""Tests of the checkpoints of full-parameter runs: resuming, other tools, damaged folders and failed saves."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from twinkle.checkpoint_engine import AdapterMismatch
from twinkle.data_format import InputFeature
from twinkle.model import SnapshotMismatch, TransformersModel
from twinkle.model.checkpoint_folder import TRAINER_STATE_FILE, write_tensors
from twinkle.model.model_checkpoint import TRAINER_FOLDER, read_model_checkpoint, write_model_checkpoint
from twinkle.model.verbs.batch_shares import SoloShares

Features = Callable[..., InputFeature]


def _full_run(folder: Path, *, optimizer: str = 'AdamW') -> TransformersModel:
    model = TransformersModel(str(folder))
    model.set_optimizer(optimizer, lr=1e-2)
    model.set_lr_scheduler('LinearLR', total_iters=5)
    return model


def _train(model: TransformersModel, features: list[InputFeature]) -> list[float]:
    losses: list[float] = []
    for feature in features:
        losses.append(model.forward_backward(feature)['loss'])
        model.clip_grad_and_step()
    return losses


@pytest.fixture(params=[1, 3])
def base_dir(request: pytest.FixtureRequest, tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """Folder of a tiny model with one weights file, or with several."""
    if request.param == 1:
        return tiny_llama_dir
    folder = tmp_path / 'sharded'
    shutil.copytree(tiny_llama_dir, folder)
    (folder / 'model.safetensors').unlink()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    model.save_pretrained(folder, max_shard_size='100KB')
    assert len(list(folder.glob('*.safetensors'))) >= request.param
    return folder


def test_resumed_run_continues_bitwise(base_dir: Path, tmp_path: Path, make_feature: Features) -> None:
    """A run that resumes in another trainer continues bitwise, with its accumulated gradient, schedule and counters.

    Transformers loads the folder as a model and computes the log-probabilities of the trainer.
    """
    features = [make_feature(10 + step, step) for step in range(6)]
    model = _full_run(base_dir)
    _train(model, features[:2])
    model.forward_backward(features[2])
    folder = Path(model.save('middle', str(tmp_path), save_optimizer=True, consumed_train_samples=3))
    assert not list(tmp_path.glob('.middle*')), 'temporary folders remain'
    resumed = TransformersModel(str(base_dir))
    resumed.set_optimizer('SGD', lr=1.0)
    counters = resumed.resume_from_checkpoint(str(folder))
    assert counters == {'cur_step': 2, 'gradient_accumulation_steps': 1, 'consumed_train_samples': 3}
    logps = model.forward_only(features[0])['logps'][0]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    ids, labels = (torch.as_tensor(features[0][name])[None] for name in ('input_ids', 'labels'))
    with torch.no_grad():
        logits = plain(input_ids=ids).logits.log_softmax(-1)
    counted = labels[0] != -100
    expected = logits[0].gather(1, labels[0].clamp(min=0)[:, None])[counted, 0]
    torch.testing.assert_close(torch.as_tensor(logps)[counted], expected, atol=2e-5, rtol=1e-5)
    assert _train(model, features[3:]) == _train(resumed, features[3:])
    own, other = model.get_state_dict(), resumed.get_state_dict()
    assert all(torch.equal(own[name], other[name]) for name in own)


def test_save_replaces_the_whole_folder(tiny_llama_dir: Path, tmp_path: Path, make_feature: Features) -> None:
    """A second save with the same name removes all files of the first one, including its state for resuming."""
    model = _full_run(tiny_llama_dir)
    _train(model, [make_feature()])
    folder = Path(model.save('one', str(tmp_path), save_optimizer=True))
    assert (folder / TRAINER_FOLDER).is_dir()
    _train(model, [make_feature(9, 9)])
    model.save('one', str(tmp_path))
    assert not (folder / TRAINER_FOLDER).exists()
    with pytest.raises(SnapshotMismatch):
        model.load('one', str(tmp_path), load_optimizer=True)
    model.load('one', str(tmp_path))


def test_weights_that_a_run_does_not_train_are_not_lost(
    tiny_llama_dir: Path, tmp_path: Path, make_feature: Features
) -> None:
    """A run refuses a checkpoint with other trained weights than those of the run, and reads plain model folders."""
    model = _full_run(tiny_llama_dir)
    _train(model, [make_feature()])
    folder = Path(model.save('whole', str(tmp_path)))
    part = {name: weight for name, weight in model.engine.model.base_parameters.items() if '.mlp.' in name}
    with pytest.raises(SnapshotMismatch, match='does not train'):
        read_model_checkpoint(folder, part, base_folder=tiny_llama_dir, ranks=SoloShares())
    read = read_model_checkpoint(tiny_llama_dir, part, base_folder=tiny_llama_dir, ranks=SoloShares())
    assert read.adapter.keys() == part.keys()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    'flipped weight': lambda folder: _flip(folder / 'model.safetensors'),
    'flipped optimizer': lambda folder: _flip(next((folder / TRAINER_FOLDER).iterdir())),
    'no weights': lambda folder: (folder / 'model.safetensors').unlink(),
    'no optimizer file': lambda folder: next((folder / TRAINER_FOLDER).iterdir()).unlink(),
    'no optimizer folder': lambda folder: shutil.rmtree(folder / TRAINER_FOLDER),
    'no digests': lambda folder: (folder / 'b3sums').unlink(),
    'truncated digests': lambda folder: (folder / 'b3sums').write_text('0'),
    'other configuration': lambda folder: (folder / 'config.json').write_text(json.dumps({})),
    'no folder': shutil.rmtree,
}


def test_damaged_folders_are_refused(tiny_llama_dir: Path, tmp_path: Path, make_feature: Features) -> None:
    """A folder with a missing or changed file is refused before the run changes."""
    model = _full_run(tiny_llama_dir)
    _train(model, [make_feature()])
    intact = Path(model.save('intact', str(tmp_path), save_optimizer=True))
    _train(model, [make_feature(9, 9)])
    before = model.get_state_dict()
    expected = model.engine.export_state('default', is_optimizer_included=True)
    for name, damage in DAMAGES.items():
        folder = tmp_path / 'damaged'
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(intact, folder)
        damage(folder)
        with pytest.raises(SnapshotMismatch):
            model.resume_from_checkpoint(str(folder))
        assert all(torch.equal(before[key], tensor) for key, tensor in model.get_state_dict().items()), name
    after = model.engine.export_state('default', is_optimizer_included=True)
    assert {key: bytes(data.data) for key, data in (after.trainer or {}).items()} == {
        key: bytes(data.data) for key, data in (expected.trainer or {}).items()
    }
    model.resume_from_checkpoint(str(intact))


def test_checkpoints_of_other_models_are_refused(
    tiny_llama_dir: Path, tiny_qwen3_dir: Path, tmp_path: Path, make_feature: Features
) -> None:
    """A run does not load a model with other weights; any folder of the same model can be loaded without its state."""
    other = _full_run(tiny_qwen3_dir)
    _train(other, [make_feature()])
    folder = other.save('other', str(tmp_path), save_optimizer=True)
    model = _full_run(tiny_llama_dir)
    _train(model, [make_feature()])
    for loading, path in ((model, folder), (other, str(tiny_llama_dir))):
        with pytest.raises(SnapshotMismatch):
            loading.load(path)
    model.load(str(tiny_llama_dir))
    expected = load_file(tiny_llama_dir / 'model.safetensors')['model.norm.weight']
    assert torch.equal(model.get_state_dict()['model.norm.weight'], expected)


def test_failed_save_leaves_the_earlier_checkpoint(
    tiny_llama_dir: Path, tmp_path: Path, make_feature: Features
) -> None:
    """If writing fails, the folder of that name has the files of the earlier save, and no temporary folder remains."""
    model = _full_run(tiny_llama_dir)
    _train(model, [make_feature()])
    folder = Path(model.save('kept', str(tmp_path), save_optimizer=True))
    before = {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}
    _train(model, [make_feature()])
    snapshot = model.engine.export_state('default', is_optimizer_included=True)
    broken = tmp_path / 'broken'
    shutil.copytree(tiny_llama_dir, broken)
    (broken / 'absent.json').symlink_to('nowhere')
    with pytest.raises(OSError, match='absent'):
        write_model_checkpoint(folder, snapshot, base_folder=broken, ranks=SoloShares())
    unknown = type(snapshot)(None, {'unknown.weight': snapshot.adapter['model.norm.weight']}, None, 0, ())
    with pytest.raises(AdapterMismatch):
        write_model_checkpoint(folder, unknown, base_folder=tiny_llama_dir, ranks=SoloShares())
    assert {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()} == before
    assert not list(tmp_path.glob('.kept*'))


def test_checkpoints_of_earlier_releases_can_be_resumed(
    tiny_llama_dir: Path, tmp_path: Path, make_feature: Features
) -> None:
    """A run that resumes from a folder with `trainer_state.safetensors` and without digests continues bitwise."""
    model = _full_run(tiny_llama_dir)
    _train(model, [make_feature()])
    folder = Path(model.save('old', str(tmp_path)))
    (folder / 'b3sums').unlink()
    write_tensors(folder / TRAINER_STATE_FILE, model.engine.export_state('default', is_optimizer_included=True).trainer)
    resumed = _full_run(tiny_llama_dir)
    assert resumed.resume_from_checkpoint(str(folder))['cur_step'] == 1
    assert _train(model, [make_feature(9, 9)]) == _train(resumed, [make_feature(9, 9)])
    (folder / TRAINER_STATE_FILE).write_bytes(b'damaged')
    with pytest.raises(SnapshotMismatch):
        resumed.resume_from_checkpoint(str(folder))
