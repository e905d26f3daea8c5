"""Tool use over several turns: a model that cannot multiply learns to call a tool.

The recipe uses rejection-sampling fine-tuning (RAFT, arXiv 2304.06767): each round samples chats with a tool, keeps the
chats that call it successfully and end with its result, and fine-tunes on them. Training uses exactly the tokens that
the model sampled. The tool's answers are part of the context, but have no labels.

Evaluation uses held-out products: `called` is the fraction of chats that call the tool and whose calls all succeed, and
`right` is the fraction of chats that also end with the product.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    precision: Literal['no', 'bf16'] = 'no'
    rounds: int = 3
    prompts: int = 6
    """Questions per round."""
    samples: int = 3
    """Chats per question."""
    kept: int = 6
    """Maximum number of chats per round for training."""
    passes: int = 2
    """Training steps per round, each on all chats that were kept."""
    held_out: int = 6
    """Number of held-out questions."""
    held_out_samples: int = 4
    """Chats per held-out question."""
    max_tokens: int = 16
    """Maximum number of tokens per turn."""
    lora_rank: int = 8
    learning_rate: float = 1e-3


CPU = Setting()
GPU = Setting(
    model='hf://Qwen/Qwen3-1.7B', precision='bf16', rounds=10, prompts=64, samples=8, kept=256, held_out=128,
    learning_rate=2e-4,
)  # fmt: skip

if __name__ == '__main__':
    check_options('tool_use', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook.curves import Curves
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import LoraConfig, SamplingParams, ToolCall
from twinkle.model import TransformersModel
from twinkle.rollout import MultiTurnRollout, Rollout, ToolManager
from twinkle.sampler import TorchSampler

SYSTEM = 'Multiply.'
"""System message. An example in each chat shows a call; before training, one chat in four imitates the example."""
CALL = re.compile(r'CALL (\w+)\((\d+), (\d+)\)')


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def parse_calls(text: str) -> list[ToolCall]:
    """Return the calls in a turn. This recipe replaces the template's format with a simpler format."""
    return [
        {'id': str(index), 'type': 'function', 'function': {'name': name, 'arguments': {'a': int(a), 'b': int(b)}}}
        for index, (name, a, b) in enumerate(CALL.findall(text))
    ]


def main() -> None:
    """Run the recipe."""
    run_recipe('tool_use', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Sample, select and train in each round, and evaluate before the first round and after each round."""
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
    with Curves(recipe, title='tool use', total_steps=setting.rounds + 1, plotted=plotted) as curves:
        for number in range(setting.rounds + 1):
            manager.sync_weights(merge_and_sync=False)
            numbers = evaluate(rollout(held_out, num_samples=setting.held_out_samples, seed=recipe.seed))
            if number < setting.rounds:
                questions = [question(rng) for _ in range(setting.prompts)]
                chats = rollout(questions, num_samples=setting.samples, seed=1000 * recipe.seed + number + 1)
                curves.log_rollouts(chats, rewards=[float(is_right(chat)) for chat in chats])
                numbers |= learn(model, [chat for chat in chats if is_right(chat)], setting)
            curves.record(**numbers)


def question(rng: np.random.Generator, *, is_held_out: bool = False) -> dict[str, Any]:
    """Return a chat that asks for a product; the first number is a multiple of 7 only in held-out chats."""
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
    """Return whether the chat calls the tool, and every call succeeds."""
    return chat.facts.get('tool_calls', 0) > 0 and not chat.facts.get('tool_failures', 0)


def is_right(chat: Rollout) -> bool:
    """Return whether the chat calls the tool successfully and ends with the product."""
    product = str(chat.feature['user_data']['product'])
    return has_called(chat) and re.findall(r'\d+', chat.messages[-1]['content'])[-1:] == [product]


def evaluate(chats: Sequence[Rollout]) -> dict[str, float]:
    """Return the fractions of chats with successful calls and of chats that also end with the product."""
    return {
        'called': sum(map(has_called, chats)) / len(chats),
        'right': sum(map(is_right, chats)) / len(chats),
    }


def learn(model: TransformersModel, chats: Sequence[Rollout], setting: Setting) -> dict[str, float]:
    """Fine-tune on up to `kept` of the correct chats, and return the numbers of the round."""
    features = [chat.feature for chat in chats[:: max(len(chats) // setting.kept, 1)]][: setting.kept]
    numbers = {'kept': len(features)}
    for _ in range(setting.passes if features else 0):
        output = model.forward_backward(features)
        model.clip_grad_and_step(1.0)
        numbers |= {'loss': output['loss'], 'learned_tokens': output['num_tokens']}
    return numbers | {'drawn_tokens': sum(int(np.sum(feature['completion_mask'])) for feature in features)}


if __name__ == '__main__':
    main()
