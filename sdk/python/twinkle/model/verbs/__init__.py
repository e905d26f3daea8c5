"""Methods of `TransformersModel`, grouped by purpose. The methods call `twinkle.model.engine`."""

from twinkle.model.verbs.configuring import ConfiguringVerbs
from twinkle.model.verbs.saving import SavingVerbs
from twinkle.model.verbs.sending import SendingVerbs
from twinkle.model.verbs.stepping import SteppingVerbs
from twinkle.model.verbs.training import TrainingVerbs

__all__ = ['ConfiguringVerbs', 'SavingVerbs', 'SendingVerbs', 'SteppingVerbs', 'TrainingVerbs']
