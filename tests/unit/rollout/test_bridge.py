"""What stands between two turns, in the chat templates that exist."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fixtures.chat_templates import ALL
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.rollout import ChatCannotGoOn
from twinkle.rollout.bridge import bridge_tokens
from twinkle.template import Template, TemplateError

ANSWER = [{'role': 'user', 'content': 'more'}]
BETWEEN = {
    'chatml': '<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n',
    'marked': '<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n',
    'thinking': '<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n',
    'brackets': '<|im_end|>[INST] more [/INST]',
}


@pytest.fixture(scope='module')
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Template]:
    """Build a template over the byte tokenizer from its source."""

    def make(source: str) -> Template:
        folder: Path = tmp_path_factory.mktemp('tokenizer')
        build_tiny_tokenizer(folder)
        (folder / 'chat_template.jinja').write_text(source)
        return Template(str(folder))

    return make


@pytest.mark.parametrize('name', BETWEEN)
def test_an_answer_is_framed_as_the_template_frames_it(build, name):
    """A turn that was ended is not ended again; one that was cut is."""
    template = build(ALL[name])
    end = template.tokenizer.token_id('<|im_end|>')
    cut = template.decode(bridge_tokens(template, ANSWER, last_token=end + 100))
    ended = template.decode(bridge_tokens(template, ANSWER, last_token=end))
    assert cut == BETWEEN[name]
    assert '<|im_end|>' + ended == BETWEEN[name]


def test_a_template_without_earlier_turns_cannot_go_on(build):
    """It would show the model a chat that never was."""
    template = build("{% for message in messages[-1:] %}{{ message['content'] }}{% endfor %}")
    with pytest.raises(ChatCannotGoOn):
        bridge_tokens(template, ANSWER, last_token=2)


def test_what_the_template_refuses_is_refused(build):
    """Answers of tools, where the template knows none."""
    with pytest.raises(TemplateError):
        bridge_tokens(build(ALL['brackets']), [{'role': 'system', 'content': 'x'}], last_token=2)
