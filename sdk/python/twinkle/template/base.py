"""The template: chats to token features and back, with a model's own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

import numpy as np

from twinkle.data_format import IGNORE_INDEX, InputFeature, Tool, ToolCall, Trajectory
from twinkle.hub import resolve_tokenizer
from twinkle.infra import remote_class
from twinkle.template.chat_template import ChatTemplate, RenderedChat, read_chat_template
from twinkle.template.continuation import continued, token_fields
from twinkle.template.errors import ExampleTooLong, TemplateError
from twinkle.template.labels import IntVector, Span, assistant_spans, label_tokens, shift_labels
from twinkle.template.media import ReadsMedia
from twinkle.template.messages import check_tools, check_trajectory, with_system
from twinkle.template.thinking import THINK_CLOSE, THINK_OPEN, thought, with_thinking
from twinkle.template.tokenizer import ChatTokenizer, TokenizedText
from twinkle.template.tool_calls import TOOL_CALL_PARSERS, FoundCall, ToolCallParser, calls_of, text_without

TruncationStrategy = Literal['raise', 'left', 'right', 'split', 'delete']
"""What happens to an example longer than `max_length`: refuse it, drop tokens at its beginning or
end, cut it into several examples, or leave it out."""


class TemplateOptions(TypedDict, total=False):
    """How a template turns chats into tokens."""

    use_chat_template: bool
    """False: the texts of the messages are joined as they are. Unset: True."""
    max_length: int
    """Most tokens of an example. Unset: 8192."""
    truncation_strategy: TruncationStrategy
    """Unset: 'raise'."""
    default_system: str | None
    """System message of chats that have none. Unset: whatever the chat template does."""
    enable_thinking: bool
    """Whether the model may think before it answers. Unset: True."""
    is_media_read: bool
    """False: chats with images or videos are refused, though the model reads them. Unset: True."""
    tool_call_parser: str | ToolCallParser
    """How the model writes calls of tools: a name that `TOOL_CALL_PARSERS` knows, or a parser. Unset: 'hermes' where
    the chat template shows `<tool_call>`, else 'json'."""


@dataclass(frozen=True)
class EncodedChat:
    """What one chat became."""

    features: list[InputFeature]
    """One; under 'split' perhaps several, under 'delete' perhaps none."""
    token_count: int
    """Tokens of the whole chat, before it was cut."""


@remote_class()
class Template(ReadsMedia):
    """A model's chat format.

    Features hold int32 numpy arrays. Labels are shifted (see `InputFeature`) and cover what
    the assistant says, its end-of-turn token included.

    Concurrency: safe to share between threads.
    """

    def __init__(self, model_id: str, **options: Unpack[TemplateOptions]) -> None:
        """Load the tokenizer and chat template of `model_id`; weights are not downloaded.

        Raises:
            HubError: the model cannot be had.
            TemplateError: it has no fast tokenizer, or no chat template and one is wanted.
            UnknownToolCallParser: no parser is registered under that name.
            ValueError: an option is out of range.
            TypeError: an option is unknown.
        """
        unknown = sorted(set(options) - set(TemplateOptions.__annotations__))
        if unknown:
            raise TypeError(f'unknown template options {unknown}; known are {sorted(TemplateOptions.__annotations__)}')
        self.model_id = model_id
        self.max_length = options.get('max_length', 8192)
        self.truncation_strategy: TruncationStrategy = options.get('truncation_strategy', 'raise')
        self.default_system = options.get('default_system')
        self.enable_thinking = options.get('enable_thinking', True)
        if self.max_length < 1:
            raise ValueError(f'max_length must be at least 1, got {self.max_length}')
        if self.truncation_strategy not in get_args(TruncationStrategy):
            allowed = ', '.join(get_args(TruncationStrategy))
            raise ValueError(f'truncation_strategy must be one of {allowed}, got {self.truncation_strategy!r}')
        folder = resolve_tokenizer(model_id)
        self.tokenizer = ChatTokenizer(folder)
        """Text to token ids and back."""
        source = read_chat_template(folder, self.tokenizer.settings)
        self._chat_template: ChatTemplate | None = None
        if options.get('use_chat_template', True):
            if source is None:
                raise TemplateError(
                    f'{model_id} has no chat template; give use_chat_template=False to join plain texts'
                )
            self._chat_template = ChatTemplate(source, special_tokens=self.tokenizer.special_tokens)
        super().__init__(folder if options.get('is_media_read', True) else None, self.tokenizer)
        shown = 'hermes' if self._mentions('<tool_call>') else 'json'
        parser = options.get('tool_call_parser', shown)
        self.tool_call_parser = TOOL_CALL_PARSERS.parser(parser) if isinstance(parser, str) else parser
        """Finds calls of tools in what the model says."""

    @cached_property
    def opens_thought(self) -> bool:
        """Whether the generation prompt opens the thought, so that what is sampled begins within it."""
        asked = cast('Trajectory', {'messages': [{'role': 'user', 'content': '.'}]})
        try:
            text = self._render(asked, add_generation_prompt=True).text
        except TemplateError:
            return False
        return text.rstrip().endswith(THINK_OPEN)

    def format_trajectory(self, trajectory: Mapping[str, Any]) -> Trajectory:
        """Return a checked copy: default system added, thinking where the chat template looks for it.

        Raises:
            InvalidTrajectory: names the field, such as `messages[1].role`.
        """
        if self._media is not None:
            trajectory = self._media.formatted(trajectory)
        messages = with_system(check_trajectory(trajectory, is_media_read=self.is_mm), self.default_system)
        tools = check_tools(trajectory.get('tools'))
        is_kept_apart, is_opened = self._mentions('reasoning_content'), self.opens_thought
        formatted: dict[str, Any] = dict(trajectory)
        formatted['messages'] = [
            with_thinking(message, is_kept_apart=is_kept_apart, is_opened=is_opened) for message in messages
        ]
        if tools:
            formatted['tools'] = tools
        return cast('Trajectory', formatted)

    def render(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> str:
        """Return the text a chat is tokenised from.

        Raises:
            InvalidTrajectory: names the field.
            TemplateError: the chat template refuses the chat.
        """
        return self._render(self.format_trajectory(trajectory), add_generation_prompt=add_generation_prompt).text

    def encode(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> InputFeature:
        """Return one chat as one feature.

        Args:
            add_generation_prompt: end with the opening of an assistant turn and give no labels (for sampling).

        Raises:
            InvalidTrajectory: names the field, such as `messages[1].role`.
            ExampleTooLong: it has more than `max_length` tokens, under 'raise'.
            TemplateError: it becomes several features or none, under 'split' or 'delete'; use `batch_encode`.
        """
        features = self.batch_encode([trajectory], add_generation_prompt=add_generation_prompt)
        if len(features) != 1:
            raise TemplateError(f'the example became {len(features)} features; use batch_encode')
        return features[0]

    def batch_encode(
        self, trajectories: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> list[InputFeature]:
        """Return chats as features, in order; under 'split' and 'delete' there may be more or fewer than chats.

        Raises:
            InvalidTrajectory: as `encode`, of the first chat that is wrong.
            ExampleTooLong: as `encode`.
        """
        chats = self.encode_chats(trajectories, add_generation_prompt=add_generation_prompt)
        return [feature for chat in chats for feature in chat.features]

    def encode_chats(
        self, trajectories: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> list[EncodedChat]:
        """Return what each chat became, in order.

        Raises:
            InvalidTrajectory: as `encode`, of the first chat that is wrong.
            ExampleTooLong: as `encode`.
        """
        formatted = [self.format_trajectory(trajectory) for trajectory in trajectories]
        rendered = [self._render(chat, add_generation_prompt=add_generation_prompt) for chat in formatted]
        for chat in rendered:
            self._refuse_far_too_long(chat.text)
        tokenized = self.tokenizer.tokenize([chat.text for chat in rendered])
        encoded: list[EncodedChat] = []
        for given, chat, text, tokens in zip(trajectories, formatted, rendered, tokenized, strict=True):
            media = self._read_media(given, chat)
            if self._media is not None:
                tokens = self._media.expanded(tokens, media)  # noqa: PLW2901 - the same chat, now with its images
            # Finding the turns costs more than all else, so that what will not be kept is spared it.
            is_kept = self._keeps(len(tokens.token_ids), is_prompt=add_generation_prompt, is_media=bool(media))
            spans = self._spans(chat, text) if is_kept and not add_generation_prompt else ()
            pieces = self._fit(tokens, spans) if is_kept else []
            features = [self._feature(ids, labels, chat, is_prompt=add_generation_prompt) for ids, labels in pieces]
            encoded.append(EncodedChat([self._with_media(one, media) for one in features], len(tokens.token_ids)))
        return encoded

    def check(self, trajectory: Mapping[str, Any]) -> str | None:
        """Return why a chat would not be trained on, None if nothing is wrong with it."""
        try:
            features = self.batch_encode([trajectory])
        except TemplateError as error:
            return str(error)
        if not features:
            return f'it has more than max_length {self.max_length} tokens and is left out'
        if all((np.asarray(feature['labels']) == IGNORE_INDEX).all() for feature in features if 'labels' in feature):
            return 'nothing in it is trained on: no assistant message, or it was truncated away'
        if any(message.get('tool_calls') for message in trajectory['messages']) and not self._mentions('tool_calls'):
            return 'its tool calls are not trained on: the chat template does not write them'
        return None

    def batch_check(self, trajectories: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return `check` of each chat."""
        return [self.check(trajectory) for trajectory in trajectories]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in token_ids]

    def concat_input_feature(self, prompt_feature: InputFeature, new_tokens: Sequence[int]) -> InputFeature:
        """Return the prompt with a completion behind it, labelled on the completion; no token is changed.

        What the prompt already has of an earlier turn is kept: labels, `completion_mask` (where it has labels alone,
        they say which tokens were produced), and the numbers beside the labels, such as `old_logps`. These go on
        with 0.0, `loss_weights` with 1.0, for the caller to set.

        Raises:
            InvalidFeature: names the field that holds no token ids, or is not as long as the prompt.
        """
        return continued(prompt_feature, new_tokens)

    def parse_tool_call(self, text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
        """Return the calls of tools in a sampled turn, in order, as messages hold them; their ids count from 0.

        Any text is taken. What is half a call or malformed is none, and neither is one within the model's thought,
        also where the prompt opened it and nothing closes it.

        Args:
            tools: those the model was offered; Qwen3.5's calls do not say of what type an argument is.
        """
        return calls_of(self._calls(text, tools))

    def clean_tool_call(self, text: str) -> str:
        """Return a sampled turn without the calls that `parse_tool_call` finds; without any, as it is."""
        return text_without(text, self._calls(text, ()))

    def _calls(self, text: str, tools: Sequence[Tool]) -> list[FoundCall]:
        if self.opens_thought and THINK_CLOSE not in text:
            return []  # The thought that the prompt opened goes on to the end.
        thinking = thought(text, is_opened=self.opens_thought)
        begin = thinking[1] if thinking else 0
        # Blanks in place of the thought keep every position.
        return list(self.tool_call_parser.find(' ' * begin + text[begin:], tools))

    def _mentions(self, name: str) -> bool:
        return self._chat_template is not None and self._chat_template.mentions(name)

    def _refuse_far_too_long(self, text: str) -> None:
        """Refuse, under 'raise', what need not be tokenised to know that it does not fit."""
        if self.truncation_strategy != 'raise':
            return
        least = self.tokenizer.least_token_count(text)
        if least > self.max_length:
            raise ExampleTooLong(least, self.max_length)

    def _keeps(self, count: int, *, is_prompt: bool, is_media: bool) -> bool:
        """Return whether anything of so many tokens becomes a feature.

        Raises:
            ExampleTooLong: nothing may be cut from them.
        """
        strategy = self.truncation_strategy
        if count <= self.max_length or (strategy == 'left' and not is_media):
            return True
        # 'right' and 'split' too would cut the opening of the turn that a prompt ends with; an image is never cut.
        if strategy == 'raise' or ((is_prompt or is_media) and strategy != 'delete'):
            raise ExampleTooLong(count, self.max_length)
        return strategy != 'delete'

    def _render(self, chat: Trajectory, *, add_generation_prompt: bool) -> RenderedChat:
        messages = cast('list[Any]', chat.get('messages', []))
        if self._media is not None:
            messages = self._media.shown(messages)
        if self._chat_template is None:
            return _joined(messages)
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=chat.get('tools'),
            enable_thinking=self.enable_thinking,
        )

    def _spans(self, chat: Trajectory, rendered: RenderedChat) -> Sequence[Span]:
        if self._chat_template is None or self._chat_template.marks_generation:
            return rendered.generated

        def render(messages: Any, *, add_generation_prompt: bool) -> str:
            changed = cast('Trajectory', {**chat, 'messages': messages})
            return self._render(changed, add_generation_prompt=add_generation_prompt).text

        special_texts = self.tokenizer.special_texts
        return assistant_spans(chat.get('messages', []), rendered.text, render=render, special_texts=special_texts)

    def _fit(self, tokens: TokenizedText, spans: Sequence[Span]) -> list[tuple[IntVector, IntVector]]:
        """Return `(input_ids, labels)` pieces of at most `max_length` tokens, labels shifted within each."""
        ids = np.asarray(tokens.token_ids, dtype=np.int32)
        labels = label_tokens(tokens.token_ids, tokens.offsets, spans)
        count, limit = len(ids), self.max_length
        match self.truncation_strategy:
            case _ if count <= limit:
                ranges = [(0, count)]
            case 'left':
                ranges = [(count - limit, count)]
            case 'right':
                ranges = [(0, limit)]
            case _:
                ranges = [(begin, begin + limit) for begin in range(0, count, limit)]
        return [(ids[begin:end], shift_labels(labels[begin:end])) for begin, end in ranges]

    def _feature(self, ids: IntVector, labels: IntVector, chat: Trajectory, *, is_prompt: bool) -> InputFeature:
        feature = InputFeature(messages=[dict(message) for message in chat.get('messages', [])])
        feature.update(token_fields(ids))
        if not is_prompt:
            feature['labels'] = labels
        if chat.get('user_data'):
            feature['user_data'] = chat.get('user_data', [])
        return feature


def _joined(messages: Sequence[Mapping[str, Any]]) -> RenderedChat:
    """Join the messages' texts; what the assistant says is what is trained on."""
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for message in messages:
        text = str(message.get('content', ''))
        if message.get('role') == 'assistant':
            spans.append((length, length + len(text)))
        pieces.append(text)
        length += len(text)
    return RenderedChat(''.join(pieces), tuple(spans))
