"""llama.cpp reads the GGUF files of merged models, and continues prompts like transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fixtures.tiny_model import add_merge, build_tiny_model
from twinkle.checkpoint_engine.gguf_file import GgufModel

PACKAGES = Path(sys.prefix) / 'llama_cpp'
"""Folder of the package of requirements.txt; `./run test --all` installs it."""
PROMPTS = [[5, 100, 17, 250, 42, 9, 77, 203], [1, 88, 90, 300, 60, 61], list(range(10, 60))]
COUNT = 40
TEXT = 'he said: "héllo"  12\n'
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def continued(file: Path) -> dict[str, Any]:
    """Return what llama.cpp computes with a file."""
    command = [sys.executable, str(Path(__file__).with_name('program.py')), str(file), TEXT, str(COUNT)]
    paths = [str(PACKAGES), os.environ.get('PYTHONPATH', '')]
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [*command, *map(json.dumps, PROMPTS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def expected(folder: Path) -> list[list[int]]:
    """Return the most probable continuations of the prompts, which end at the end of the sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3'])
def test_llama_cpp_continues_prompts_like_transformers(tmp_path: Path, family: str) -> None:
    """The tokens of a text and the most probable continuations are those of transformers with the model folder."""
    folder = build_tiny_model(tmp_path / 'model', family=family)
    add_merge(folder)
    GgufModel(folder, dtype='float32').write(tmp_path / 'model.gguf', lambda *_: None)
    found = continued(tmp_path / 'model.gguf')
    assert found['text'] == AutoTokenizer.from_pretrained(folder)(TEXT, add_special_tokens=False).input_ids
    assert found['continuations'] == expected(folder)
    assert max(map(len, found['continuations'])) == COUNT
