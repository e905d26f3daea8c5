"""Training on images, beside adapters that see none."""

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

COLOURS = {'red': (255, 0, 0), 'blue': (0, 0, 255)}


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model; read-only."""
    return build_tiny_vision(tmp_path_factory.mktemp('vision') / 'tiny')


def colour_chat(name):
    """Return a chat whose answer nothing but the pixels gives away."""
    messages = [{'role': 'user', 'content': '<image>'}, {'role': 'assistant', 'content': name}]
    return {'messages': messages, 'images': [Image.new('RGB', (32, 32), COLOURS[name])]}


def test_an_adapter_learns_what_only_the_pixels_say(folder):
    """Two chats with the same text and other images get other answers."""
    model = TransformersModel(str(folder))
    model.add_adapter_to_model('default', LoraConfig(r=8, lora_alpha=16, seed=0))
    model.set_optimizer('AdamW', lr=0.01)
    model.set_template('Template')
    chats = [colour_chat(name) for name in COLOURS]
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
    """Train adapters of these features in one pass; return each one's numbers as bytes."""
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


def test_tenants_of_text_and_of_images_get_the_bits_they_get_alone(folder):
    """In one pass, losses and gradients of both are to the bit what each gets by itself."""
    template = Template(str(folder))
    text = {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'yes'}]}
    seen = {**colour_chat('red'), 'images': [picture(48, 64)]}
    features = {'text': template.encode(text), 'image': template.encode(seen)}
    together = run_together(folder, features)
    for name, feature in features.items():
        assert len(together[name]) > 1
        assert together[name] == run_together(folder, {name: feature})[name]


def test_a_text_model_refuses_images(folder, tiny_llama_dir):
    """Pixels that nothing would look at are refused by the name of their field."""
    feature = Template(str(folder)).encode(colour_chat('red'))
    model = TransformersModel(str(tiny_llama_dir))
    model.add_adapter_to_model('default', LoraConfig(r=4))
    bare = {name: value for name, value in feature.items() if name != 'position_ids'}
    with pytest.raises(InvalidFeatures) as refused:
        model.forward_only([bare])
    assert refused.value.field == 'pixel_values'
