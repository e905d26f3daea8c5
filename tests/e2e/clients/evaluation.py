"""Evaluates models with lm-eval, embeds texts with three libraries, and prints the results as JSON.

The test runs it in a separate process, because only this process has the packages of requirements.txt on its path.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import litellm
from langchain_openai import OpenAIEmbeddings
from lm_eval import simple_evaluate
from openai import OpenAI

CHOICES: dict[str, Any] = {
    'task': 'choices',
    'output_type': 'multiple_choice',
    'doc_to_text': '{{question}}',
    'doc_to_choice': '{{choices}}',
    'doc_to_target': '{{answer}}',
    'target_delimiter': '',
    'metric_list': [{'metric': 'acc', 'aggregation': 'mean', 'higher_is_better': True}],
}
ANSWERS: dict[str, Any] = {
    'task': 'answers',
    'output_type': 'generate_until',
    'doc_to_text': '{{question}}',
    # The answer of a completion ends before the stop string.
    'doc_to_target': '{{choices[answer].removesuffix(".")}}',
    'generation_kwargs': {'until': ['.'], 'max_gen_toks': 16},
    'metric_list': [{'metric': 'exact_match', 'aggregation': 'mean', 'higher_is_better': True}],
}


def use_lm_eval(base_url: str, name: str, folder: Path) -> dict[str, Any]:
    """Return the accuracies of both tasks, and the log-likelihoods of the choices of each question.

    Args:
        base_url: URL of the API.
        name: model to evaluate.
        folder: folder with the tokenizer and the questions.
    """
    files = {'test': str(folder / 'questions.jsonl')}
    source = {'dataset_path': 'json', 'dataset_kwargs': {'data_files': files}, 'test_split': 'test'}
    results = simple_evaluate(
        model='local-completions',
        model_args={
            'model': name,
            'base_url': f'{base_url}/completions',
            'tokenizer': str(folder),
            'tokenizer_backend': 'huggingface',
            'max_length': 512,
            'max_retries': 1,
        },
        tasks=[{**CHOICES, **source}, {**ANSWERS, **source}],
        batch_size=4,
        bootstrap_iters=0,
    )
    assert results is not None
    samples = sorted(results['samples']['choices'], key=lambda sample: sample['doc_id'])
    return {
        'choices': results['results']['choices']['acc,none'],
        'answers': results['results']['answers']['exact_match,none'],
        'likelihoods': [[float(pair[0]) for (pair,) in sample['resps']] for sample in samples],
    }


def embed(base_url: str, api_key: str, name: str, texts: list[str]) -> dict[str, list[list[float]]]:
    """Return the embeddings of texts by the name of the client."""
    chain = OpenAIEmbeddings(model=name, base_url=base_url, api_key=api_key, check_embedding_ctx_length=False)
    unified = litellm.embedding(model=f'openai/{name}', input=texts, api_base=base_url, api_key=api_key)
    client = OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    return {
        'langchain': chain.embed_documents(texts),
        'litellm': [item['embedding'] for item in unified.data],
        'openai': [item.embedding for item in client.embeddings.create(model=name, input=texts).data],
    }


def main(base_url: str, folder: str, *names: str) -> None:
    """Evaluate each model, embed the questions with the last one, and print the results."""
    questions = [json.loads(line)['question'] for line in (Path(folder) / 'questions.jsonl').read_text().splitlines()]
    results: dict[str, Any] = {name: use_lm_eval(base_url, name, Path(folder)) for name in names}
    results['embeddings'] = embed(base_url, os.environ['OPENAI_API_KEY'], names[-1], questions)
    sys.stdout.write(json.dumps(results) + '\n')


if __name__ == '__main__':
    main(*sys.argv[1:])
