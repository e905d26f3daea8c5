"""Unit tests of the tokens between two turns (the bridge), with several chat templates."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.chat_templates import ALL
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.rollout import ChatCannotGoOn
from twinkle.rollout.bridge import bridge_tokens
from twinkle.template import Template, TemplateError

ANSWER = [{'role': 'user', 'content': 'more'}]
BRIDGES = {
    'chatml': '<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n',
    'marked': '<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n',
    'thinking': '<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n',
    'brackets': '<|im_end|>[INST] more [/INST]',
}
"""Text between a truncated turn and the model's next turn, by chat template."""


@pytest.fixture(scope='module')
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Template]:
    """Build a template from its source, with the byte tokenizer."""

    def make(source: str) -> Template:
        folder: Path = tmp_path_factory.mktemp('tokenizer')
        build_tiny_tokenizer(folder)
        (folder / 'chat_template.jinja').write_text(source)
        return Template(str(folder))

    return make


@pytest.mark.parametrize('name', BRIDGES)
def test_an_answer_is_formatted_by_the_template(build, name):
    """The bridge ends a truncated turn, and does not repeat the end of a complete turn."""
    template = build(ALL[name])
    end = template.tokenizer.token_id('<|im_end|>')
    cut = template.decode(bridge_tokens(template, ANSWER, last_token=end + 100))
    complete = template.decode(bridge_tokens(template, ANSWER, last_token=end))
    assert cut == BRIDGES[name]
    assert '<|im_end|>' + complete == BRIDGES[name]


def test_a_template_without_earlier_turns_is_refused(build):
    """A chat template that renders only the last message raises ChatCannotGoOn."""
    template = build("{% for message in messages[-1:] %}{{ message['content'] }}{% endfor %}")
    with pytest.raises(ChatCannotGoOn):
        bridge_tokens(template, ANSWER, last_token=2)


def test_errors_of_the_template_propagate(build):
    """A message whose role the template does not support raises TemplateError."""
    with pytest.raises(TemplateError):
        bridge_tokens(build(ALL['brackets']), [{'role': 'system', 'content': 'x'}], last_token=2)
