"""GRPO with a fleet of two samplers: `twinkle up --samplers 2`, then `python -m examples.grpo_over_services`.

The gateway divides the prompts of each step between the samplers. The reward is the share of digits in an answer.
"""

from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle_client import init_twinkle_client
from twinkle_client.checkpoint_engine import CheckpointEngineManager
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

MODEL = 'smollm2-135m-instruct'
PROMPTS = ['Count to ten.', 'What year is it?', 'How old are you?', 'What is 6 times 7?']
STEPS, SAMPLES = 15, 8

with init_twinkle_client():
    model, sampler = MultiLoraTransformersModel(MODEL), Sampler(MODEL)
    model.add_adapter_to_model('default', LoraConfig(r=16, seed=1))
    model.set_optimizer('AdamW', lr=4e-3)
    model.set_loss('GRPOLoss', epsilon=0.2)
    weights, advantage = CheckpointEngineManager(model, sampler), GRPOAdvantage()
    chats = [{'messages': [{'role': 'user', 'content': prompt}]} for prompt in PROMPTS]
    for step in range(STEPS):
        weights.sync_weights(merge_and_sync=False)
        params = SamplingParams(max_tokens=16, logprobs=1, seed=step)
        answers = sampler.sample(chats, params, num_samples=SAMPLES).sequences
        rewards = [sum(map(str.isdigit, answer.decoded)) / max(len(answer.decoded), 1) for answer in answers]
        advantages = advantage(rewards, num_generations=SAMPLES, scale='group').tolist()
        model.forward_backward([answer.new_input_feature for answer in answers], advantages=advantages)
        model.clip_grad_and_step()
        model.rollouts().log(answers, step=step, rewards=rewards, advantages=advantages, groups=SAMPLES)
        print(f'step {step:2}  reward {sum(rewards) / len(rewards):.3f}')
