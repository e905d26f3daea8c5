"""Recipes of tinker-cookbook, with their arguments and the metrics that show whether they learned."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from e2e.cookbook.corpus import MARKETS

MODEL = 'Qwen/Qwen3.5-9B-Base'
"""Default model name of the recipes. The stack serves the small real model under this name."""
RENDERER = 'role_colon'
"""The cookbook's format of conversations for this model: plain text without special tokens."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe and its arguments."""

    module: str
    """Program of the cookbook."""
    arguments: Mapping[str, str]
    """Arguments by name, in addition to the log folder."""
    metric: str
    """Metric in `metrics.jsonl` that shows whether the recipe learned."""
    is_rising: bool = False
    """Whether larger values are better, as for rewards."""
    initial_recipe: str = ''
    """Recipe whose final weights this recipe starts from. Empty: the base model."""
    weights_argument: str = ''
    """Argument for the path of the initial weights. Empty: the recipe resumes from the checkpoint in its log folder."""


_PROBLEMS = 'tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder'
"""Class that builds the dataset of problems."""
_CHAT = 'tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder'
"""Class that builds the dataset of conversations."""
_RL_ARGUMENTS: Mapping[str, str] = {'learning_rate': '5e-5', 'max_tokens': '12'}
"""Default arguments of the recipes for reinforcement learning."""

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        'sl_loop': Recipe(
            module='sl_loop',
            arguments={'batch_size': '8', 'max_steps': '16', 'learning_rate': '1e-3', 'lora_rank': '16'},
            metric='train_mean_nll',
        ),
        'sl_basic': Recipe(
            module='sl_basic',
            arguments={
                'dataset_builder': _CHAT,
                'dataset_builder.common_config.model_name_for_tokenizer': MODEL,
                'dataset_builder.common_config.renderer_name': RENDERER,
                'dataset_builder.common_config.max_length': '512',
                'dataset_builder.common_config.batch_size': '4',
                'max_steps': '9',
                'learning_rate': '1e-3',
                'lora_rank': '16',
            },
            metric='train_mean_nll',
        ),
        'chat_sl': Recipe(
            module='chat_sl.train',
            arguments={
                'dataset': 'conversations.jsonl',
                'batch_size': '8',
                'max_steps': '12',
                'learning_rate': '4e-4',
                'lora_rank': '16',
            },
            metric='train_mean_nll',
        ),
        'preference.dpo': Recipe(
            module='preference.dpo.train',
            arguments={'batch_size': '2', 'max_steps': '9', 'learning_rate': '1e-4'},
            metric='dpo_loss',
        ),
        'math_rl': Recipe(
            module='math_rl.train',
            arguments={
                'env': 'arithmetic',
                'model_name': MODEL,
                'group_size': '4',
                'groups_per_batch': '6',
                'max_steps': '14',
                **_RL_ARGUMENTS,
                'learning_rate': '1.5e-4',
            },
            metric='env/all/reward/total',
            is_rising=True,
            initial_recipe='sl_loop',
            weights_argument='load_checkpoint_path',
        ),
        'rl_basic': Recipe(
            module='rl_basic',
            arguments={
                'dataset_builder': _PROBLEMS,
                'dataset_builder.model_name_for_tokenizer': MODEL,
                'dataset_builder.renderer_name': RENDERER,
                'dataset_builder.convo_prefix': 'None',
                'dataset_builder.batch_size': '4',
                'dataset_builder.group_size': '4',
                'max_steps': '10',
                **_RL_ARGUMENTS,
            },
            metric='env/all/reward/total',
            is_rising=True,
            initial_recipe='sl_loop',
            weights_argument='load_checkpoint_path',
        ),
        'rl_loop': Recipe(
            module='rl_loop',
            arguments={'batch_size': '3', 'group_size': '4', 'max_steps': '9', **_RL_ARGUMENTS},
            metric='reward/total',
            is_rising=True,
            initial_recipe='sl_loop',
        ),
        'rl_loop.gspo': Recipe(
            module='rl_loop',
            arguments={'loss_fn': 'gspo', 'batch_size': '3', 'group_size': '4', 'max_steps': '9', **_RL_ARGUMENTS},
            metric='reward/total',
            is_rising=True,
            initial_recipe='sl_loop',
        ),
        'decisions': Recipe(
            module='decisions.forecasting',
            arguments={
                'data_path': MARKETS,
                'split_date': '2026-01-01',
                'model_name': MODEL,
                'renderer_name': 'qwen3_instruct',
                'batch_size': '8',
                'max_steps': '14',
                'eval_every': '1',
                'learning_rate': '2e-4',
                'lora_rank': '16',
            },
            metric='test/brier_reward',
            is_rising=True,
        ),
    }
)
"""Recipes by name, in the order in which they run."""
