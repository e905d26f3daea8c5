"""The trainer on the small real model, compared with plain transformers and peft."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle.data_format import LoraConfig
from twinkle.hub import get_model
from twinkle.model import TransformersModel

TEXT = 'Who are you? I am Twinkle, a small assistant that was trained in a minute.'


@pytest.mark.slow
def test_trained_adapter_has_the_same_logprobs_in_plain_peft(tmp_path):
    """An adapter that is saved after three steps has the trainer's log-probabilities in peft, within 1e-4."""
    folder = get_model('smollm2-135m-instruct')
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)['input_ids']
    feature = {'input_ids': ids[:-1], 'labels': ids[1:]}
    model = TransformersModel('smollm2-135m-instruct', device='cpu')
    model.add_adapter_to_model('default', LoraConfig(r=8, lora_alpha=16, seed=1))
    model.set_optimizer('AdamW', lr=1e-3)
    losses = []
    for _ in range(3):
        losses.append(model.forward_backward([feature])['loss'])
        model.clip_grad_and_step()
    output = model.forward_only([feature])
    saved = model.save('three-steps', str(tmp_path))
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), saved)
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([ids[:-1]])).logits[0]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert output['loss'] < losses[0] - 0.1
    torch.testing.assert_close(torch.tensor(output['logps'][0]), expected, atol=1e-4, rtol=0)
