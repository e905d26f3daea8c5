"""Supervised fine-tuning against a running stack: `twinkle up`, then `python -m examples.sft_in_20_lines`."""

from twinkle.data_format import LoraConfig
from twinkle_client import init_twinkle_client
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

MODEL = 'smollm2-135m-instruct'

with init_twinkle_client():
    dataset = Dataset('examples/data/self_cognition.jsonl')
    dataset.set_template('Template', model_id=MODEL, max_length=256)
    dataset.map('SelfCognitionProcessor', init_args={'model_name': 'Twinkle', 'model_author': 'the Twinkle team'})
    dataset.encode()
    model = MultiLoraTransformersModel(MODEL)
    model.add_adapter_to_model('default', LoraConfig(r=8, target_modules='all-linear'))
    model.set_optimizer('AdamW', lr=4e-3)
    for step, batch in enumerate(DataLoader(dataset, batch_size=8, shuffle=True, epochs=2)):
        output = model.forward_backward(batch)
        model.clip_grad_and_step()
        print(step, output['loss'])
    version = model.publish_version()
    question = {'messages': [{'role': 'user', 'content': 'Who are you?'}]}
    answer = Sampler(MODEL).sample(question, {'max_tokens': 40, 'temperature': 0}, 'default', version=version)
    print(answer.sequences[0].decoded, model.save('final'))
