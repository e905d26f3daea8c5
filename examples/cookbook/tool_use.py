"""Tool use over several turns: a model that cannot multiply learns to ask a tool, by keeping what went well.

Rejection-sampling fine-tuning (RAFT, arXiv 2304.06767): each round samples chats with a tool, keeps those that called
it rightly and passed its answer on, and fine-tunes on these. Chats go token in, token out: what the model drew is
trained on as it was drawn, and what the tool said is read and never trained on.

Measured on products that are never trained on: `called`, the share of chats with a call that worked, and `right`, of
those whose last word is the product, too.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from examples.cookbook.curves import Curves
from examples.cookbook.recipe import Recipe, run_recipe
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import LoraConfig, SamplingParams, ToolCall
from twinkle.hub import BUILT_IN_MODELS
from twinkle.model import TransformersModel
from twinkle.rollout import MultiTurnRollout, Rollout, ToolManager
from twinkle.sampler import TorchSampler

SYSTEM = 'Multiply.'
"""The one example in each chat shows how; at the start about one chat in four follows it."""
CALL = re.compile(r'CALL (\w+)\((\d+), (\d+)\)')


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    precision: Literal['no', 'bf16'] = 'no'
    rounds: int = 3
    prompts: int = 6
    """Questions of a round."""
    samples: int = 3
    """Chats of each question."""
    kept: int = 6
    """Most chats of a round that are trained on."""
    passes: int = 2
    """Steps on them."""
    held_out: int = 6
    held_out_samples: int = 4
    """Chats of each held-out question."""
    max_tokens: int = 16
    """Of a turn."""
    lora_rank: int = 8
    learning_rate: float = 1e-3


CPU = Setting()
GPU = Setting(
    model='hf://Qwen/Qwen3-1.7B', precision='bf16', rounds=10, prompts=64, samples=8, kept=256, held_out=128,
    learning_rate=2e-4,
)  # fmt: skip


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def parse_calls(text: str) -> list[ToolCall]:
    """Return the calls in a turn: a format of one's own, in place of the template's."""
    return [
        {'id': str(place), 'type': 'function', 'function': {'name': name, 'arguments': {'a': int(a), 'b': int(b)}}}
        for place, (name, a, b) in enumerate(CALL.findall(text))
    ]


def main() -> None:
    """Run the recipe."""
    run_recipe('tool_use', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Sample, keep, learn, and again; look at the held-out products before and after each round."""
    setting = recipe.setting
    rng = np.random.default_rng(recipe.seed)
    held_out = [question(rng, is_held_out=True) for _ in range(setting.held_out)]
    model = TransformersModel(setting.model, mixed_precision=setting.precision)
    model.add_adapter_to_model('default', LoraConfig(r=setting.lora_rank, lora_alpha=16, seed=recipe.seed))
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    sampler = TorchSampler(setting.model, model=model.engine.model)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    params = SamplingParams(max_tokens=setting.max_tokens)
    rollout = MultiTurnRollout(sampler, None, ToolManager([multiply]), params, parse_tool_call=parse_calls, max_turns=3)
    plotted = ['called', 'right', 'kept', 'loss']
    with Curves(recipe.out, title='tool use', total_steps=setting.rounds + 1, plotted=plotted) as curves:
        for number in range(setting.rounds + 1):
            manager.sync_weights(merge_and_sync=False)
            numbers = judge(rollout(held_out, num_samples=setting.held_out_samples, seed=recipe.seed))
            if number < setting.rounds:
                questions = [question(rng) for _ in range(setting.prompts)]
                chats = rollout(questions, num_samples=setting.samples, seed=1000 * recipe.seed + number + 1)
                numbers |= learn(model, [chat for chat in chats if is_right(chat)], setting)
            curves.record(**numbers)


def question(rng: np.random.Generator, *, is_held_out: bool = False) -> dict[str, Any]:
    """Return a chat that asks for a product. Held out are those whose first number is a multiple of 7."""
    first = int(rng.choice([number for number in range(11, 99) if (number % 7 == 0) is is_held_out]))
    second = int(rng.integers(11, 99))
    messages = [
        {'role': 'system', 'content': SYSTEM},
        {'role': 'user', 'content': '12 times 20'},
        {'role': 'assistant', 'content': 'CALL multiply(12, 20)'},
        {'role': 'tool', 'content': '240'},
        {'role': 'assistant', 'content': '240'},
        {'role': 'user', 'content': f'{first} times {second}'},
    ]
    return {'messages': messages, 'user_data': {'product': first * second}}


def has_called(chat: Rollout) -> bool:
    """Whether the tool was called, and every call worked."""
    return chat.facts.get('tool_calls', 0) > 0 and not chat.facts.get('tool_failures', 0)


def is_right(chat: Rollout) -> bool:
    """Whether the tool was called and the chat ends with the product."""
    product = str(chat.feature['user_data']['product'])
    return has_called(chat) and re.findall(r'\d+', chat.messages[-1]['content'])[-1:] == [product]


def judge(chats: Sequence[Rollout]) -> dict[str, float]:
    """Return how often the tool was called, and how often the product was said."""
    return {
        'called': sum(map(has_called, chats)) / len(chats),
        'right': sum(map(is_right, chats)) / len(chats),
    }


def learn(model: TransformersModel, chats: Sequence[Rollout], setting: Setting) -> dict[str, float]:
    """Fine-tune on chats that went well; what the tool said has no labels."""
    features = [chat.feature for chat in chats[:: max(len(chats) // setting.kept, 1)]][: setting.kept]
    numbers = {'kept': len(features)}
    for _ in range(setting.passes if features else 0):
        output = model.forward_backward(features)
        model.clip_grad_and_step(1.0)
        numbers |= {'loss': output['loss'], 'learned_tokens': output['num_tokens']}
    return numbers | {'drawn_tokens': sum(int(np.sum(feature['completion_mask'])) for feature in features)}


if __name__ == '__main__':
    main()
