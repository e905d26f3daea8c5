"""The documented program that uses only the data components runs unchanged."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from twinkle.dataloader import DataLoader
from twinkle.dataset import DatasetMeta, PackingDataset
from twinkle.preprocessor import SelfCognitionProcessor

IDENTITY_FILE = Path(__file__).parents[3] / 'examples/data/self_cognition.jsonl'


@pytest.fixture
def hub(tmp_path: Path, tiny_qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mirror with the program's dataset and model."""
    dataset = tmp_path / 'datasets/swift/self-cognition'
    dataset.mkdir(parents=True)
    shutil.copy(IDENTITY_FILE, dataset)
    (tmp_path / 'models/Qwen').mkdir(parents=True)
    (tmp_path / 'models/Qwen/Qwen3.5-4B').symlink_to(tiny_qwen3_dir)
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures('hub')
def test_dataset_only_program_gives_packed_batches() -> None:
    """The program returns a batch of packs, and most packs are nearly full."""
    dataset_meta = DatasetMeta(
        dataset_id='ms://swift/self-cognition',
    )
    dataset = PackingDataset(dataset_meta)
    dataset.map(SelfCognitionProcessor(model_name='Twinkle Model', model_author='ModelScope Community'))
    dataset.set_template('Qwen3_5Template', model_id='ms://Qwen/Qwen3.5-4B', max_length=512)
    dataset.encode()
    dataset.pack_dataset()
    dataloader = DataLoader(dataset, batch_size=8)
    batch = next(iter(dataloader))
    assert len(batch) == 8
    assert {'input_ids', 'position_ids', 'labels'} <= set(batch[0])
    assert np.median([len(pack['input_ids']) for pack in batch]) > 480
