"""Forward path shared by the trainer and the sampler.

All tokens of a batch are stored on one flat row axis T; each sequence and each adapter has a contiguous range of rows.
The frozen base model runs once over all rows, attention runs within each sequence, and each adapter's low-rank
update is applied to its own rows. The trainer and the torch engine of the sampler use the same code, so
the log-probabilities that they report for the same tokens agree.
"""

from twinkle.nn.base_weights import merged_parameters, replace_parameters
from twinkle.nn.causal_lm import PackedCausalLM
from twinkle.nn.cpu_products import choose_reproducible_kernels
from twinkle.nn.dropout import RowDropout
from twinkle.nn.errors import ExpertDropout, PackError, UnknownParameters, UnknownTargetModules, UnsupportedModel
from twinkle.nn.expert_routing import ExpertRouting, RoutingShape
from twinkle.nn.full_weights import FullWeights, select_parameters
from twinkle.nn.head import HeadOutputs
from twinkle.nn.head_weights import HeadAdapter, log_probabilities
from twinkle.nn.kernel_layer import KernelLayer
from twinkle.nn.kv_cache import CacheSize, KVCache
from twinkle.nn.layer_update import AdapterWeights, LayerDropout, LayerUpdate
from twinkle.nn.lora_factors import LoraFactors
from twinkle.nn.lora_weights import LoraWeights
from twinkle.nn.media import MediaSpan
from twinkle.nn.packed_model import PackedModel
from twinkle.nn.peft_files import (
    TensorShard,
    divided_like,
    gathered,
    load_adapter,
    save_adapter,
    tensor_data_of,
    tensor_of,
    tensor_view_of,
)
from twinkle.nn.precision import chosen_dtype, device_memory, float32_products, torch_device
from twinkle.nn.row_layout import RowLayout, RowRanks
from twinkle.nn.sharding import BaseSharding
from twinkle.nn.spans import AdapterSpan, SequenceSpan

choose_reproducible_kernels()

__all__ = [
    'AdapterSpan',
    'AdapterWeights',
    'BaseSharding',
    'CacheSize',
    'ExpertDropout',
    'ExpertRouting',
    'FullWeights',
    'HeadAdapter',
    'HeadOutputs',
    'KVCache',
    'KernelLayer',
    'LayerDropout',
    'LayerUpdate',
    'LoraFactors',
    'LoraWeights',
    'MediaSpan',
    'PackError',
    'PackedCausalLM',
    'PackedModel',
    'RoutingShape',
    'RowDropout',
    'RowLayout',
    'RowRanks',
    'SequenceSpan',
    'TensorShard',
    'UnknownParameters',
    'UnknownTargetModules',
    'UnsupportedModel',
    'chosen_dtype',
    'device_memory',
    'divided_like',
    'float32_products',
    'gathered',
    'load_adapter',
    'log_probabilities',
    'merged_parameters',
    'replace_parameters',
    'save_adapter',
    'select_parameters',
    'tensor_data_of',
    'tensor_of',
    'tensor_view_of',
    'torch_device',
]
