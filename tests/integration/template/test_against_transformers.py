"""Compares tokens, labels and decoded text with those of transformers for the same tokenizer folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from fixtures.chat_templates import ALL
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.hub import get_model
from twinkle.template import Template

CHATS: list[dict[str, Any]] = [
    {'messages': [{'role': 'user', 'content': 'x   12é 🙂 <|im_end|> &<>"\''}]},
    {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': ' b\n'}]},
    {
        'messages': [
            {'role': 'user', 'content': 'a'},
            {'role': 'assistant', 'content': 'b', 'reasoning_content': 'r'},
            {'role': 'user', 'content': 'c'},
            {'role': 'assistant', 'content': 'd', 'reasoning_content': 's'},
        ]
    },
]
TOOL = {'type': 'function', 'function': {'name': 'add', 'description': 'é<', 'parameters': {'type': 'object'}}}


@pytest.fixture(params=[*ALL, 'smollm2'])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Tokenizer folder for each kind of chat template, and the folder of the small real model."""
    if request.param == 'smollm2':
        return get_model('smollm2-135m-instruct')
    build_tiny_tokenizer(tmp_path)
    (tmp_path / 'chat_template.jinja').write_text(ALL[request.param])
    return tmp_path


@pytest.mark.parametrize('chat', CHATS)
@pytest.mark.parametrize('tools', [None, [TOOL]])
def test_tokens_are_those_of_transformers(folder: Path, chat: dict[str, Any], tools: list[Any] | None) -> None:
    """A chat gives the token ids of transformers, with and without a generation prompt."""
    ours, theirs = Template(str(folder)), AutoTokenizer.from_pretrained(folder)
    messages = ours.format_trajectory(chat)['messages']
    for has_prompt in (False, True):
        expected = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=has_prompt)['input_ids']
        ids = ours.encode({**chat, 'tools': tools}, add_generation_prompt=has_prompt)['input_ids']
        np.testing.assert_array_equal(ids, expected)


def test_marked_labels_are_those_of_transformers(tmp_path: Path) -> None:
    """If a template marks the assistant's text, the labels equal the assistant mask of transformers."""
    build_tiny_tokenizer(tmp_path)
    (tmp_path / 'chat_template.jinja').write_text(ALL['marked'])
    ours, theirs = Template(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    chat = CHATS[1]['messages']
    expected = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    labels = np.asarray(ours.encode({'messages': chat})['labels'])
    np.testing.assert_array_equal(np.append(0, labels[:-1] != -100), expected['assistant_masks'])


def test_decoded_text_equals_that_of_transformers(folder: Path) -> None:
    """Decoding gives the same text as transformers, with and without special tokens."""
    ours, theirs = Template(str(folder)), AutoTokenizer.from_pretrained(folder)
    ids = list(ours.encode(CHATS[0])['input_ids'])
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)
