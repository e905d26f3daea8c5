"""Training losses, one per file, computed over the counted labels of a batch.

Each docstring states the formula and paper, the streams that the loss reads, the divisor of the loss
(`LossOutput.num_tokens`) and its metrics. A new algorithm does not need a new loss: see `WeightedLogpsLoss` and
`custom`.
"""

from twinkle.loss.base import OUTPUT_NAMES, Loss, LossBatch
from twinkle.loss.bnpo import BNPOLoss
from twinkle.loss.cispo import CISPOLoss
from twinkle.loss.cpo import CPOLoss
from twinkle.loss.cross_entropy import CrossEntropyLoss
from twinkle.loss.custom import CustomGradients, CustomLoss, custom_gradients
from twinkle.loss.dpo import DPOLoss
from twinkle.loss.dr_grpo import DRGRPOLoss
from twinkle.loss.dro import DROLoss
from twinkle.loss.errors import InvalidLossInput, MissingOutput, MissingStream
from twinkle.loss.gkd import GKDLoss
from twinkle.loss.grpo import GRPOLoss
from twinkle.loss.gspo import GSPOLoss
from twinkle.loss.importance_sampling import ImportanceSamplingLoss
from twinkle.loss.infonce import InfonceLoss
from twinkle.loss.mse import MSELoss
from twinkle.loss.orpo import ORPOLoss
from twinkle.loss.pairs import PairLoss
from twinkle.loss.policy import PolicyLoss
from twinkle.loss.ppo import PPOLoss
from twinkle.loss.ppo_value import PPOValueLoss
from twinkle.loss.registry import LOSSES, PLUGIN_GROUP, build_loss
from twinkle.loss.reinforce import ReinforceLoss
from twinkle.loss.reporting import merge_metrics
from twinkle.loss.sapo import SAPOLoss
from twinkle.loss.simpo import SimPOLoss
from twinkle.loss.soft_cross_entropy import SoftCrossEntropyLoss
from twinkle.loss.tinker import TINKER_LOSSES
from twinkle.loss.weighted_logps import WeightedLogpsLoss

__all__ = [
    'LOSSES',
    'OUTPUT_NAMES',
    'PLUGIN_GROUP',
    'TINKER_LOSSES',
    'BNPOLoss',
    'CISPOLoss',
    'CPOLoss',
    'CrossEntropyLoss',
    'CustomGradients',
    'CustomLoss',
    'DPOLoss',
    'DRGRPOLoss',
    'DROLoss',
    'GKDLoss',
    'GRPOLoss',
    'GSPOLoss',
    'ImportanceSamplingLoss',
    'InfonceLoss',
    'InvalidLossInput',
    'Loss',
    'LossBatch',
    'MSELoss',
    'MissingOutput',
    'MissingStream',
    'ORPOLoss',
    'PPOLoss',
    'PPOValueLoss',
    'PairLoss',
    'PolicyLoss',
    'ReinforceLoss',
    'SAPOLoss',
    'SimPOLoss',
    'SoftCrossEntropyLoss',
    'WeightedLogpsLoss',
    'build_loss',
    'custom_gradients',
    'merge_metrics',
]
