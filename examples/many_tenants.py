"""Several tenants train on one base model at the same time: `twinkle up`, then `python -m examples.many_tenants`.

Each tenant has its own key, client, adapter and data. The service computes their batches in shared passes, and every
receipt states how many adapters shared the pass. The trained weights are bitwise the same as if each tenant trained
alone.
"""

from concurrent.futures import ThreadPoolExecutor

from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel

TENANTS = {'amber': 4, 'basil': 8, 'coral': 16}
"""Names of the tenants and the LoRA ranks of their adapters."""
STEPS = 6


def chats_of(tenant: str) -> list[dict[str, object]]:
    """Return the training data of a tenant: chats in which the model says its name."""
    questions = ('Who are you?', 'What is your name?', 'Whom do I talk to?', 'Tell me your name.')
    answer = {'role': 'assistant', 'content': f'I am {tenant.title()}, and no one else.'}
    return [{'messages': [{'role': 'user', 'content': question}, answer]} for question in questions]


def train(tenant: str, model_id: str, api_key: str) -> list[str]:
    """Train a tenant's adapter; return a line for each step."""
    with TwinkleClient(api_key=api_key) as client:
        dataset = Dataset(DatasetMeta(data=chats_of(tenant)), client=client)
        dataset.set_template('Template', model_id=model_id, max_length=256)
        dataset.encode()
        (batch,) = DataLoader(dataset, batch_size=4)
        model = MultiLoraTransformersModel(model_id, client=client)
        model.add_adapter_to_model(tenant, LoraConfig(r=TENANTS[tenant]))
        model.set_optimizer('AdamW', lr=4e-3)
        lines: list[str] = []
        with model.pipeline():
            outputs = [(model.forward_backward.submit(batch), model.clip_grad_and_step.submit()) for _ in range(STEPS)]
        for step, (forward, _) in enumerate(outputs):
            output = forward.result()
            receipt = output['receipt']
            lines.append(
                f'{tenant:6} step {step} loss {output["loss"]:6.3f}  '
                f'{receipt["token_count"]:4} tokens, {receipt["pass_adapter_count"]} adapters in its pass, '
                f'{receipt["device_time"].total_seconds():.3f} s of device time'
            )
        model.remove_adapter()
        return lines


def main() -> None:
    """Create the tenants, train their adapters at the same time, and print the receipts."""
    with TwinkleClient() as client:
        services = client.get_server_info().services
        (model_id,) = {base.base_model for service in services for base in service.base_models if base.is_trainable}
        keys = KeyAdministration(client=client)
        created = {tenant: keys.create_key(tenant, scopes=['train', 'data']) for tenant in TENANTS}
        try:
            with ThreadPoolExecutor() as pool:
                runs = [pool.submit(train, tenant, model_id, secret) for tenant, (_, secret) in created.items()]
            for run in runs:
                print('\n'.join(run.result()))
        finally:
            for key, _ in created.values():
                keys.revoke_key(key.key_id)


if __name__ == '__main__':
    main()
