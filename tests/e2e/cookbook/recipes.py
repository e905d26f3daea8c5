"""The recipes that are run, unmodified: their arguments, and by what one sees that they learned."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MODEL = 'Qwen/Qwen3.5-9B-Base'
"""The name that recipes ask for unless told otherwise; the small real model is served under it."""
RENDERER = 'role_colon'
"""How the cookbook writes conversations for that model: its text alone, without special tokens."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe as it is run here."""

    module: str
    """Program of the cookbook."""
    arguments: Mapping[str, str]
    """Beside the folder for its log."""
    metric: str
    """Of its `metrics.jsonl`."""
    is_rising: bool = False
    """Whether more of it is better: rewards, not losses."""
    begins_from: str = ''
    """Recipe whose weights this one goes on with. Empty: the base model."""
    begins_by: str = ''
    """Argument that names those weights. Empty: it resumes from what its log folder says of them."""


_PROBLEMS = 'tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder'
_CHAT = 'tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder'
_GO_ON: Mapping[str, str] = {'learning_rate': '5e-5', 'max_tokens': '12'}

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
                **_GO_ON,
                'learning_rate': '1.5e-4',
            },
            metric='env/all/reward/total',
            is_rising=True,
            begins_from='sl_loop',
            begins_by='load_checkpoint_path',
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
                **_GO_ON,
            },
            metric='env/all/reward/total',
            is_rising=True,
            begins_from='sl_loop',
            begins_by='load_checkpoint_path',
        ),
        'rl_loop': Recipe(
            module='rl_loop',
            arguments={'batch_size': '3', 'group_size': '4', 'max_steps': '9', **_GO_ON},
            metric='reward/total',
            is_rising=True,
            begins_from='sl_loop',
        ),
    }
)
"""In the order they are run."""
