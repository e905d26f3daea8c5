"""The least number of tokens of a text: never more than it has, and enough to refuse what is far too long."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from fixtures.chat_templates import CHATML
from services.sampler.backends.prompt_encoder import PromptEncoder
from services.sampler.domain.errors import ContextExceeded
from services.sampler.domain.generation import ChatPrompt, EngineFacts, TextPrompt
from twinkle.data_format import Message, Trajectory
from twinkle.template.token_bound import TokenBound


def byte_level(normalizer: normalizers.Normalizer | None = None, *, without: str = '') -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with some longer tokens and an added one."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    merges = [('t', 'h'), ('th', 'e'), ('Ġ', 'the'), ('Ġ', 'Ġ'), ('ĠĠ', 'ĠĠ'), ('a', 'n'), ('an', 'a')]
    names = [*alphabet, *(first + second for first, second in merges)]
    made = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(['<|im_start|>'])
    return made


PLAIN, COMPOSING = byte_level(), byte_level(normalizers.NFC())
LEAVING_OUT = byte_level(without='ÃxĀ')
"""Has no token for some bytes, as models in use do: what they stand for vanishes."""


@given(
    st.lists(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(
                ['the the the', '    ' * 9, '<|im_start|>', 'e\u0301' * 9, '\u1100\u1161\u11a8', 'ana'] * 2
            ),
        ),
        max_size=12,
    ).map(''.join),
    st.sampled_from([PLAIN, COMPOSING, LEAVING_OUT]),
)
def test_no_text_has_fewer_tokens_than_is_said(text: str, tokenizer: tokenizers.Tokenizer) -> None:
    """Also where characters are composed before they are read, or special tokens stand in the text."""
    text = text.encode('utf-8', 'ignore').decode()
    least = TokenBound(tokenizer).least_count(text)
    assert least <= len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert not text or least > 0 or tokenizer is LEAVING_OUT


@pytest.mark.parametrize(
    'normalizer',
    [normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase(), normalizers.Sequence([normalizers.NFC()])],
)
def test_nothing_is_said_where_text_may_vanish(normalizer: normalizers.Normalizer) -> None:
    """A tokenizer whose ways are not known to keep every byte is not second-guessed."""
    assert TokenBound(byte_level(normalizer)).least_count('a' * 1000) == 0


def test_nothing_is_said_of_tokenizers_with_an_unknown_token() -> None:
    """One such token may stand for any number of characters; so may blanks that an added token takes with it."""
    words = tokenizers.Tokenizer(models.WordLevel({'[UNK]': 0}, unk_token='[UNK]'))
    assert TokenBound(words).least_count('a' * 1000) == 0
    greedy = byte_level()
    greedy.add_special_tokens([tokenizers.AddedToken('<blank>', lstrip=True)])
    assert TokenBound(greedy).least_count(' ' * 1000) == 0


def test_prompt_that_is_far_too_long_is_refused_untokenised(tmp_path: Path) -> None:
    """A text, and a chat, that cannot fit are refused as too long; what may fit is tokenised as ever."""
    PLAIN.save(str(tmp_path / 'tokenizer.json'))
    (tmp_path / 'config.json').write_text('{}')
    (tmp_path / 'tokenizer_config.json').write_text(json.dumps({'chat_template': CHATML}))
    encoder = PromptEncoder(str(tmp_path), vocabulary_size=300)
    facts = EngineFacts(
        base_model='m', context_tokens=100, vocabulary_size=300, parameter_count=0, dtype='float32', max_sequences=1
    )
    long = 'the ' * 1_000_000
    with pytest.raises(ContextExceeded) as refusal:
        encoder.encode(TextPrompt(long), facts)
    # Fewer than it has: nobody has counted them.
    assert 100 < refusal.value.prompt_tokens < 1_000_000
    chat = ChatPrompt(trajectory=Trajectory(messages=[Message(role='user', content=long)]))
    with pytest.raises(ContextExceeded) as refusal:
        encoder.encode(chat, facts)
    assert 100 < refusal.value.prompt_tokens < 1_000_000
    assert len(encoder.encode(TextPrompt('the' * 200), facts)) == 200
