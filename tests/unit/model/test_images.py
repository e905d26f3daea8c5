"""Tests of training on images, alone and together with text."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fixtures.tiny_vision import build_tiny_vision, picture
from twinkle.data_format import LoraConfig
from twinkle.model import TransformersModel
from twinkle.model.engine import BatchItem, ForwardOptions, TrainerEngine
from twinkle.nn import PackedCausalLM
from twinkle.processor import InvalidFeatures
from twinkle.template import Template

COLORS = {'red': (255, 0, 0), 'blue': (0, 0, 255)}


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny vision-language model; read-only."""
    return build_tiny_vision(tmp_path_factory.mktemp('vision') / 'tiny')


def color_chat(name):
    """Return a chat whose answer can only be predicted from the pixels."""
    messages = [{'role': 'user', 'content': '<image>'}, {'role': 'assistant', 'content': name}]
    return {'messages': messages, 'images': [Image.new('RGB', (32, 32), COLORS[name])]}


def test_adapter_learns_from_pixels(folder):
    """A trained adapter predicts the answers of two chats better with their images than with swapped images."""
    model = TransformersModel(str(folder))
    model.add_adapter_to_model('default', LoraConfig(r=8, lora_alpha=16, seed=0))
    model.set_optimizer('AdamW', lr=0.01)
    model.set_template('Template')
    chats = [color_chat(name) for name in COLORS]
    for _ in range(30):
        model.forward_backward(chats)
        model.clip_grad_and_step(1.0)
    template = Template(str(folder))
    swapped = [{**chat, 'images': chats[1 - index]['images']} for index, chat in enumerate(chats)]
    right, wrong = (
        sum(float(np.sum(logps)) for logps in model.forward_only(template.batch_encode(given))['logps'])
        for given in (chats, swapped)
    )
    assert right > wrong + 2


def run_together(folder, features):
    """Train adapters with these features in one pass; return log-probabilities and gradients as bytes."""
    engine = TrainerEngine(PackedCausalLM.load(folder), max_pass_tokens=256)
    for name in features:
        engine.create_adapter(name, LoraConfig(r=4, lora_alpha=8, seed=len(name)))
    items = [
        BatchItem(adapter_id=name, features=[one], options=ForwardOptions(), is_training=True)
        for name, one in features.items()
    ]
    results = dict(zip(features, engine.run_batch(items), strict=True))
    return {
        name: [
            result.logps[0].tobytes(),
            *(one.grad.numpy().tobytes() for one in engine.adapter(name).parameters() if one.grad is not None),
        ]
        for name, result in results.items()
    }


def test_text_and_images_share_a_pass_bitwise(folder):
    """A text and an image feature have bitwise the same results in a shared pass as in separate passes."""
    template = Template(str(folder))
    text = {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]}
    with_image = {**color_chat('red'), 'images': [picture(48, 64)]}
    features = {'text': template.encode(text), 'image': template.encode(with_image)}
    together = run_together(folder, features)
    for name, feature in features.items():
        assert len(together[name]) > 1
        assert together[name] == run_together(folder, {name: feature})[name]


def test_a_text_model_refuses_images(folder, tiny_llama_dir):
    """A text model refuses images, and the error names the field."""
    feature = Template(str(folder)).encode(color_chat('red'))
    model = TransformersModel(str(tiny_llama_dir))
    model.add_adapter_to_model('default', LoraConfig(r=4))
    bare = {name: value for name, value in feature.items() if name != 'position_ids'}
    with pytest.raises(InvalidFeatures) as refused:
        model.forward_only([bare])
    assert refused.value.field == 'pixel_values'
