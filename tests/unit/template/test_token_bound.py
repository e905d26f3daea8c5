"""A lower bound of a text's token count never exceeds the count, and is high enough to refuse very long texts."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from fixtures.chat_templates import CHATML
from twinkle.data_format import Message, Trajectory
from twinkle.template.token_bound import TokenBound
from twinkle_services.sampler.backends.prompt_encoder import PromptEncoder
from twinkle_services.sampler.domain.errors import ContextExceeded
from twinkle_services.sampler.domain.generation import ChatPrompt, EngineFacts, TextPrompt


def byte_level(normalizer: normalizers.Normalizer | None = None, *, without: str = '') -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with some longer tokens and one added token."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
    merges = [('t', 'h'), ('th', 'e'), ('Ġ', 'the'), ('Ġ', 'Ġ'), ('ĠĠ', 'ĠĠ'), ('a', 'n'), ('an', 'a')]
    names = [*alphabet, *(first + second for first, second in merges)]
    result = tokenizers.Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if normalizer is not None:
        result.normalizer = normalizer
    result.add_special_tokens(['<|im_start|>'])
    return result


PLAIN, COMPOSING = byte_level(), byte_level(normalizers.NFC())
"""Tokenizers without a normalizer, and with a normalizer that composes characters."""
INCOMPLETE = byte_level(without='ÃxĀ')
"""A tokenizer whose vocabulary lacks some bytes; these bytes disappear from the text."""


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
    st.sampled_from([PLAIN, COMPOSING, INCOMPLETE]),
)
def test_the_bound_never_exceeds_the_token_count(text: str, tokenizer: tokenizers.Tokenizer) -> None:
    """The bound holds for special tokens and for characters that the normalizer composes."""
    text = text.encode('utf-8', 'ignore').decode()
    bound = TokenBound(tokenizer).min_count(text)
    assert bound <= len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert not text or bound > 0 or tokenizer is INCOMPLETE


@pytest.mark.parametrize(
    'normalizer',
    [normalizers.NFKC(), normalizers.Strip(), normalizers.Lowercase(), normalizers.Sequence([normalizers.NFC()])],
)
def test_the_bound_is_zero_if_a_normalizer_may_drop_text(normalizer: normalizers.Normalizer) -> None:
    """The bound is 0 for normalizers that may not keep all text."""
    assert TokenBound(byte_level(normalizer)).min_count('a' * 1000) == 0


def test_the_bound_is_zero_if_a_token_may_cover_any_length() -> None:
    """The bound is 0 if an unknown token, or an added token that strips whitespace, may cover any length."""
    words = tokenizers.Tokenizer(models.WordLevel({'[UNK]': 0}, unk_token='[UNK]'))
    assert TokenBound(words).min_count('a' * 1000) == 0
    greedy = byte_level()
    greedy.add_special_tokens([tokenizers.AddedToken('<blank>', lstrip=True)])
    assert TokenBound(greedy).min_count(' ' * 1000) == 0


def test_a_very_long_prompt_is_refused_without_tokenizing(tmp_path: Path) -> None:
    """Texts and chats that cannot fit are refused by the bound; other texts are tokenized as usual."""
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
    # The reported number is the bound, which is smaller than the real count of one million.
    assert 100 < refusal.value.prompt_tokens < 1_000_000
    chat = ChatPrompt(trajectory=Trajectory(messages=[Message(role='user', content=long)]))
    with pytest.raises(ContextExceeded) as refusal:
        encoder.encode(chat, facts)
    assert 100 < refusal.value.prompt_tokens < 1_000_000
    assert len(encoder.encode(TextPrompt('the' * 200), facts)) == 200
