"""Distillation on the student's own words: `python -m examples.cookbook.gkd`.

Generalized Knowledge Distillation (arXiv 2306.13649, algorithm 1): the student answers, the teacher says which tokens
it would have thought of at each place of that answer, and their generalised Jensen-Shannon divergence falls (equation
1). The teacher is any model with the same tokens: with `--setting gpu` a larger one, with `--setting cpu` the same one
told to talk like a pirate, which the student is not: what the instruction does goes into the student's weights.

Held out: `divergence`, the mean over the tokens of the teacher's own answers to questions that are not trained on.
With `--setting cpu` and seeds 0, 1 and 2 it falls to less than 0.6 of its start; docs/learning.md has the curves.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from examples.cookbook.curves import Curves
from examples.cookbook.recipe import Recipe, run_recipe
from twinkle.checkpoint_engine import CheckpointEngineManager
from twinkle.data_format import IGNORE_INDEX, InputFeature, LoraConfig, SamplingParams
from twinkle.hub import BUILT_IN_MODELS
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
    """Of a step."""
    max_tokens: int = 12
    top_k: int = 32
    learning_rate: float = 2e-3
    lora_rank: int = 8
    beta: float = 0.5
    """0: the teacher's divergence from the student, 1: the student's from the teacher."""
    on_policy: float = 1.0
    """Probability that a step's answers are the student's own; else the teacher's."""


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


@dataclass(frozen=True)
class Speaker:
    """A model that answers questions, and what it is told before each."""

    sampler: Sampler
    system: str
    params: SamplingParams
    is_base: bool
    """Whether it is the model without an adapter."""

    def answers(self, questions: Sequence[str], *, seed: int) -> list[list[int]]:
        """Return the tokens it draws, one answer a question."""
        chats = [chat(self.system, question) for question in questions]
        params = replace(self.params, seed=seed)
        responses = self.sampler.sample(chats, params, use_base_model=self.is_base)
        return [response.sequences[0].tokens for response in responses]

    def features(self, questions: Sequence[str], answers: Sequence[Sequence[int]]) -> list[InputFeature]:
        """Return what it is asked with answers behind it, which are labelled."""
        prompts = [self.sampler.encode_trajectory(chat(self.system, question)) for question in questions]
        pairs = zip(prompts, answers, strict=True)
        return [self.sampler.template.concat_input_feature(prompt, answer) for prompt, answer in pairs]


def main() -> None:
    """Run the recipe."""
    run_recipe('gkd', __doc__, {'cpu': CPU, 'gpu': GPU}, train)


def train(recipe: Recipe[Setting]) -> None:
    """Train the student and record how far from the teacher it is."""
    setting, rng = recipe.setting, np.random.default_rng(recipe.seed)
    model = TransformersModel(setting.model, mixed_precision=setting.precision, device=setting.device)
    model.add_adapter_to_model('default', LoraConfig(r=setting.lora_rank, seed=recipe.seed))
    model.set_optimizer('AdamW', lr=setting.learning_rate)
    model.set_loss('GKDLoss', beta=setting.beta)
    engine = {'device': setting.device, 'dtype': 'bfloat16' if setting.precision == 'bf16' else 'float32'}
    sampler = TorchSampler(setting.model, model=model.engine.model)
    teacher_sampler = sampler if setting.teacher == setting.model else TorchSampler(setting.teacher, engine)
    params = SamplingParams(max_tokens=setting.max_tokens)
    student = Speaker(sampler, setting.student_system, params, is_base=False)
    teacher = Speaker(teacher_sampler, setting.teacher_system, params, is_base=True)
    manager = CheckpointEngineManager(model=model, sampler=sampler)
    taught, unseen = questions_of(rng)
    held_out = lesson(student, teacher, unseen, teacher.answers(unseen, seed=recipe.seed), setting.top_k)
    with Curves(recipe.out, title='GKD', total_steps=setting.steps + 1, plotted=['loss', 'divergence']) as curves:
        curves.record(divergence=model.forward_only(held_out)['metrics']['divergence'])
        for step in range(setting.steps):
            manager.sync_weights(merge_and_sync=False)
            asked = [str(question) for question in rng.choice(taught, setting.prompts, replace=False)]
            speaker = student if rng.random() < setting.on_policy else teacher
            answers = speaker.answers(asked, seed=1000 * recipe.seed + step)
            output = model.forward_backward(lesson(student, teacher, asked, answers, setting.top_k))
            model.clip_grad_and_step()
            held = model.forward_only(held_out)['metrics']['divergence']
            curves.record(loss=output['loss'], divergence=held)


def lesson(
    student: Speaker, teacher: Speaker, questions: Sequence[str], answers: Sequence[Sequence[int]], top_k: int
) -> list[InputFeature]:
    """Return answers as the student reads them, with what the teacher would have said at each place of them."""
    heard = [feature['input_ids'] for feature in teacher.features(questions, answers)]
    scored = SamplingParams(max_tokens=0, prompt_logprobs=top_k)
    responses = teacher.sampler.sample(heard, scored, use_base_model=teacher.is_base)
    features: list[InputFeature] = []
    for feature, response in zip(student.features(questions, answers), responses, strict=True):
        # Both end with the same answer, whatever each was told before it.
        places = np.flatnonzero(np.asarray(feature['labels']) != IGNORE_INDEX)
        likeliest = np.array((response.topk_prompt_logprobs or [])[-len(places) :])
        ids = np.zeros((len(feature['input_ids']), top_k), np.int64)
        logps = np.zeros(ids.shape, np.float32)
        ids[places], logps[places] = likeliest[:, :, 0], likeliest[:, :, 1]
        features.append({**feature, 'teacher_topk_ids': ids, 'teacher_topk_logps': logps})
    return features


def questions_of(rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Return questions to train on, and others of other subjects, one of each."""
    subjects = [str(subject) for subject in rng.permutation(SUBJECTS)]
    taught = [form.format(subject) for subject in subjects[HELD_OUT_SUBJECTS:] for form in QUESTIONS]
    forms = itertools.cycle(QUESTIONS)
    return taught, [form.format(subject) for form, subject in zip(forms, subjects[:HELD_OUT_SUBJECTS], strict=False)]


def chat(system: str, question: str) -> Any:
    """Return a question as a chat."""
    return {'messages': [{'role': 'system', 'content': system}, {'role': 'user', 'content': question}]}


if __name__ == '__main__':
    main()
