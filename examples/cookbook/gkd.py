"""Distillation on the student's own answers: `python -m examples.cookbook.gkd`.

The method is Generalized Knowledge Distillation (arXiv 2306.13649, algorithm 1). The student answers questions, and the
teacher computes its most likely tokens at each position of the answers. Training reduces the generalized Jensen-Shannon
divergence of the two distributions (equation 1). The teacher can be any model with the same tokenizer. With
`--setting gpu`, it is a larger model. With `--setting cpu`, it is the same model with an instruction to talk like a
pirate, which the student does not receive.

`divergence` is the mean over the tokens of the teacher's own answers to held-out questions. With `--setting cpu` and
seeds 0, 1 and 2 it falls to less than 0.6 of its initial value; docs/learning.md has the curves.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from examples.cookbook.recipe import Recipe, check_options, run_recipe
from twinkle.hub import BUILT_IN_MODELS


@dataclass(frozen=True)
class Setting:
    """Sizes and rates."""

    model: str = BUILT_IN_MODELS[0]
    teacher: str = BUILT_IN_MODELS[0]
    student_system: str = 'Answer.'
    teacher_system: str = 'Talk like a pirate, with "Arrr" and "matey".'
    precision: Literal['no', 'bf16'] = 'no'
    device: str = 'cpu'
    steps: int = 6
    prompts: int = 5
    """Questions per step."""
    max_tokens: int = 12
    """Maximum number of tokens per answer."""
    top_k: int = 32
    """Number of the teacher's most likely tokens that the loss uses at each position."""
    learning_rate: float = 2e-3
    lora_rank: int = 8
    beta: float = 0.5
    """Weight of the teacher in the mixture of the divergence. 0: KL(teacher, student), 1: KL(student, teacher)."""
    on_policy: float = 1.0
    """Probability that a step samples its answers from the student instead of the teacher."""


CPU = Setting()
GPU = Setting(
    model='hf://Qwen/Qwen3-0.6B',
    teacher='hf://Qwen/Qwen3-8B',
    teacher_system='Answer.',
    precision='bf16',
    device='cuda',
    steps=60,
    prompts=32,
    max_tokens=256,
    top_k=64,
    learning_rate=2e-4,
    lora_rank=32,
)

if __name__ == '__main__':
    check_options('gkd', __doc__, {'cpu': CPU, 'gpu': GPU})

import numpy as np

from examples.cookbook.curves import Curves
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import IGNORE_INDEX, InputFeature, LoraConfig, SampledSequence, SamplingParams
from twinkle.model import TransformersModel
from twinkle.sampler import Sampler, TorchSampler

QUESTIONS = ('Tell me about {}.', 'What do you think of {}?', 'Describe {}.')
SUBJECTS = (
    'the sea', 'a storm', 'your friends', 'breakfast', 'the moon', 'a long journey', 'music', 'winter', 'your hat',
    'gold', 'a parrot', 'the city', 'an island', 'the law', 'old books', 'your mother', 'a garden', 'sleep', 'bread',
    'the wind', 'a clock', 'rain', 'horses', 'the future', 'a ship', 'your work', 'stars', 'cheese', 'a map', 'school',
)  # fmt: skip
HELD_OUT_SUBJECTS = 6


@dataclass(frozen=True)
class Participant:
    """The student or the teacher: a sampler with a system message."""

    sampler: Sampler
    system: str
    params: SamplingParams
    is_base: bool
    """Whether to sample from the base model, without the adapter."""

    def answers(self, questions: Sequence[str], *, seed: int) -> list[SampledSequence]:
        """Return a sampled answer to each question."""
        chats = [chat(self.system, question) for question in questions]
        params = replace(self.params, seed=seed)
        responses = self.sampler.sample(chats, params, use_base_model=self.is_base)
        return [response.sequences[0] for response in responses]

    def features(self, questions: Sequence[str], answers: Sequence[SampledSequence]) -> list[InputFeature]:
        """Return the questions, each followed by its answer; the answers have labels."""
        prompts = [self.sampler.encode_trajectory(chat(self.system, question)) for question in questions]
        pairs = zip(prompts, answers, strict=True)
        return [self.sampler.template.concat_input_feature(prompt, answer.tokens) for prompt, answer in pairs]


def main() -> None:
    """Run the recipe."""
    run_recipe('gkd', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train the student and record its divergence from the teacher."""
    setting, rng = recipe.setting, np.random.default_rng(recipe.seed)
    model = TransformersModel(setting.model, mixed_precision=setting.precision, device=setting.device)
    model.add_adapter_to_model('default', LoraConfig(r=setting.lora_rank, seed=recipe.seed))
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_loss('GKDLoss', beta=setting.beta)
    engine = {'device': setting.device, 'dtype': 'bfloat16' if setting.precision == 'bf16' else 'float32'}
    sampler = TorchSampler(setting.model, model=model.engine.model)
    teacher_sampler = sampler if setting.teacher == setting.model else TorchSampler(setting.teacher, engine)
    params = SamplingParams(max_tokens=setting.max_tokens)
    student = Participant(sampler, setting.student_system, params, is_base=False)
    teacher = Participant(teacher_sampler, setting.teacher_system, params, is_base=True)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    training_questions, test_questions = split_questions(rng)
    test_answers = teacher.answers(test_questions, seed=recipe.seed)
    held_out = scored_features(student, teacher, test_questions, test_answers, setting.top_k)
    with Curves(recipe, title='GKD', total_steps=setting.steps + 1, plotted=['loss', 'divergence']) as curves:
        curves.record(divergence=model.forward_only(held_out)['metrics']['divergence'])
        for step in range(setting.steps):
            manager.sync_weights(merge_and_sync=False)
            questions = [str(question) for question in rng.choice(training_questions, setting.prompts, replace=False)]
            respondent = student if rng.random() < setting.on_policy else teacher
            answers = respondent.answers(questions, seed=1000 * recipe.seed + step)
            curves.log_rollouts(answers)
            output = model.forward_backward(scored_features(student, teacher, questions, answers, setting.top_k))
            model.clip_grad_and_step()
            divergence = model.forward_only(held_out)['metrics']['divergence']
            curves.record(loss=output['loss'], divergence=divergence)


def scored_features(
    student: Participant, teacher: Participant, questions: Sequence[str], answers: Sequence[SampledSequence], top_k: int
) -> list[InputFeature]:
    """Return the student's features of the answers, with the teacher's `top_k` most likely tokens at each label."""
    teacher_inputs = [feature['input_ids'] for feature in teacher.features(questions, answers)]
    params = SamplingParams(max_tokens=0, prompt_logprobs=top_k)
    responses = teacher.sampler.sample(teacher_inputs, params, use_base_model=teacher.is_base)
    features: list[InputFeature] = []
    for feature, response in zip(student.features(questions, answers), responses, strict=True):
        # Student and teacher have different system messages, but both inputs end with the same answer.
        positions = np.flatnonzero(np.asarray(feature['labels']) != IGNORE_INDEX)
        top_tokens = np.array((response.topk_prompt_logprobs or [])[-len(positions) :])
        ids = np.zeros((len(feature['input_ids']), top_k), np.int64)
        logps = np.zeros(ids.shape, np.float32)
        ids[positions], logps[positions] = top_tokens[:, :, 0], top_tokens[:, :, 1]
        features.append({**feature, 'teacher_topk_ids': ids, 'teacher_topk_logps': logps})
    return features


def split_questions(rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Return the training questions, and one question about each held-out subject."""
    subjects = [str(subject) for subject in rng.permutation(SUBJECTS)]
    training = [form.format(subject) for subject in subjects[HELD_OUT_SUBJECTS:] for form in QUESTIONS]
    forms = itertools.cycle(QUESTIONS)
    return training, [form.format(subject) for form, subject in zip(forms, subjects[:HELD_OUT_SUBJECTS], strict=False)]


def chat(system: str, question: str) -> Any:
    """Return a chat of a system message and a question."""
    return {'messages': [{'role': 'system', 'content': system}, {'role': 'user', 'content': question}]}


if __name__ == '__main__':
    main()
