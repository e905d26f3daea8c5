"""Time from `up` to the first token, and the memory of each service before and after some work."""

import time
from typing import Any

from benchmarks.local_stack import connected, running_stack
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackState
from twinkle_client.stack.process_ids import resident_bytes

MODEL = 'smollm2-135m-instruct'
LIGHT_SERVICES = ('gateway', 'data', 'checkpoint')


def main() -> dict[str, Any]:
    """Start a stack, sample, train two steps, and return the figures."""
    begin = time.perf_counter()
    with running_stack() as state:
        up_seconds = time.perf_counter() - begin
        with connected(state) as client:
            for _ in Sampler(MODEL, client=client).sample_stream('Hello', {'max_tokens': 1, 'temperature': 0.0}):
                break
            first_token_seconds = time.perf_counter() - begin
            idle = _memory(state)
            _work(client)
            worked = _memory(state)
    return {
        'up_seconds': round(up_seconds, 2),
        'up_to_first_token_seconds': round(first_token_seconds, 2),
        'resident_mib_idle': idle,
        'resident_mib_after_work': worked,
        'gateway_data_checkpoint_mib': round(sum(worked[name] for name in LIGHT_SERVICES), 1),
        'goal_gateway_data_checkpoint_mib': '< 600',
    }


def _memory(state: StackState) -> dict[str, float]:
    return {service.name: round(resident_bytes(service.pid) / 2**20, 1) for service in state.services}


def _work(client: TwinkleClient) -> None:
    """Encode data, train two steps, publish and sample, so that every service does some work."""
    rows = [{'query': f'What is {n} plus {n}?', 'response': str(2 * n), 'tag': 'en'} for n in range(200)]
    dataset = Dataset(DatasetMeta(data=rows), client=client)
    dataset.map('SelfCognitionProcessor', init_args={'model_name': 'Bench', 'model_author': 'Bench'})
    dataset.set_template('Template', model_id=MODEL, max_length=512)
    dataset.encode()
    model = MultiLoraTransformersModel(MODEL, client=client)
    model.add_adapter_to_model('bench', LoraConfig(r=8, seed=0))
    for index, batch in enumerate(DataLoader(dataset, batch_size=8)):
        model.forward_backward(inputs=batch)
        model.clip_grad_and_step()
        if index == 1:
            break
    version = model.publish_version()
    Sampler(MODEL, client=client).sample('Hello', {'max_tokens': 8}, adapter_name='bench', version=version)
