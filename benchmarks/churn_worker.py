"""A client of the churn benchmark: `python -m benchmarks.churn_worker ADDRESS MODEL SEED LOG`, with `TWINKLE_API_KEY`.

It runs life cycles of adapters until it is killed, and appends one line of JSON per cycle to LOG. First it deletes the
adapters and checkpoints of a killed client with the same key, as a restarted user program would.
"""

import json
import random
import sys
import time
from pathlib import Path

from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.errors import Error
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

_LARGEST_TOKEN = 4000
"""Upper bound of the random token ids, exclusive."""
_SAVE_EVERY = 3
"""A cycle saves a checkpoint with probability 1 / `_SAVE_EVERY`."""


def main() -> None:
    """Run cycles until the process is killed."""
    address, base_model, seed, log = sys.argv[1:]
    numbers = random.Random(int(seed))
    with TwinkleClient(address) as client:
        _delete_leftovers(client, base_model)
    with Path(log).open('a', encoding='utf-8') as lines:
        while True:
            begin = time.monotonic()
            try:
                with TwinkleClient(address) as client:
                    client.create_session()
                    _cycle(client, base_model, numbers)
                outcome = 'ok'
            except Error as error:
                outcome = f'{type(error).__name__}: {error}'[:200]
            print(json.dumps({'outcome': outcome, 'seconds': time.monotonic() - begin}), file=lines, flush=True)


def _delete_leftovers(client: TwinkleClient, base_model: str) -> None:
    for number, adapter in enumerate(client.list_adapters()):
        model = MultiLoraTransformersModel(base_model, client=client)
        model.attach_adapter(f'left-{number}', adapter.adapter_id)
        model.remove_adapter(f'left-{number}')
    for checkpoint in client.list_checkpoints():
        client.delete_checkpoint(checkpoint.path)


def _cycle(client: TwinkleClient, base_model: str, numbers: random.Random) -> None:
    """Create an adapter, train two steps, publish, sample, sometimes save, and delete everything."""
    model = MultiLoraTransformersModel(base_model, client=client)
    model.add_adapter_to_model('churn', LoraConfig(r=numbers.choice([1, 4, 8, 16]), seed=0))
    for _ in range(2):
        length = numbers.randrange(8, 64)
        tokens = [numbers.randrange(10, _LARGEST_TOKEN) for _ in range(length)]
        model.forward_backward(inputs=[{'input_ids': tokens, 'labels': tokens}])
        model.clip_grad_and_step()
    version = model.publish_version()
    Sampler(base_model, client=client).sample('Hello', {'max_tokens': 8}, adapter_name='churn', version=version)
    path = model.save('churn', save_optimizer=True) if numbers.randrange(_SAVE_EVERY) == 0 else ''
    model.remove_adapter()
    if path:
        client.delete_checkpoint(path)


if __name__ == '__main__':
    main()
