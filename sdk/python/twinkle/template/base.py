"""The template: converts chats to token features and back with the model's own tokenizer and chat template."""

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
from twinkle.template.messages import check_special_texts, check_tools, check_trajectory, with_system
from twinkle.template.plain_text import is_text, joined_texts
from twinkle.template.thinking import THINK_CLOSE, THINK_OPEN, thought, with_thinking
from twinkle.template.tokenizer import ChatTokenizer, TokenizedText
from twinkle.template.tool_call_registry import TOOL_CALL_PARSERS
from twinkle.tool_calls import FoundCall, ToolCallParser, calls_of, text_without

TruncationStrategy = Literal['raise', 'left', 'right', 'split', 'delete']
"""Strategies for an example longer than `max_length`: raise an error, drop tokens at the beginning or at the end, split
the example, or omit the example."""


class TemplateOptions(TypedDict, total=False):
    """Options for converting chats to tokens."""

    use_chat_template: bool
    """If False, the texts of the messages are concatenated unchanged. Default: True."""
    max_length: int
    """Maximum number of tokens in an example, at least 1. Default: 8192."""
    truncation_strategy: TruncationStrategy
    """Strategy for longer examples. Default: 'raise'."""
    default_system: str | None
    """System message for chats without one. Default: None, which leaves the choice to the chat template."""
    enable_thinking: bool
    """Whether the model may think before it answers; passed to the chat template. Default: True."""
    is_private_allowed: bool
    """Whether the model may be private on a hub; see `twinkle.hub.resolve_tokenizer`. Default: True."""
    is_move_allowed: bool
    """Whether a private model may have been renamed on the hub; see `twinkle.hub.resolve_tokenizer`. Default: True."""
    is_media_read: bool
    """If False, chats with images, videos or audio are refused even if the model supports them. Default: True."""
    refuse_special_tokens: bool
    """Whether to refuse chats whose messages or tools contain the text of a special token, such as `<|im_end|>`.
    The tokenizer cannot distinguish such text from the tokens of the chat template, so the text can forge turns. Set
    the option for text from users. Default: False."""
    tool_call_parser: str | ToolCallParser
    """Format of the model's tool calls: a name registered in `TOOL_CALL_PARSERS`, or a parser. Default: 'hermes' if the
    source of the chat template contains `<tool_call>`, else 'json'."""


@dataclass(frozen=True)
class EncodedChat:
    """The features made from one chat."""

    features: list[InputFeature]
    """One feature; 'split' may give several and 'delete' may give none."""
    token_count: int
    """Number of tokens in the whole chat, before truncation."""


@remote_class()
class Template(ReadsMedia):
    """The chat format of one model.

    The token fields of a feature are int32 numpy arrays. Labels are shifted (see `InputFeature`) and cover the
    assistant's text, including its end-of-turn token.

    Concurrency: safe to share between threads.
    """

    def __init__(self, model_id: str, **options: Unpack[TemplateOptions]) -> None:
        """Load the tokenizer and chat template of `model_id`; weights are not downloaded.

        Args:
            model_id: a hub id or a local folder.
            options: see `TemplateOptions`.

        Raises:
            HubError: the model cannot be found or downloaded.
            TemplateError: the model has no fast tokenizer, lacks the tokens of its media, or has no valid chat template
                although `use_chat_template` is True.
            UnknownToolCallParser: no parser is registered under the given name.
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
        self.refuse_special_tokens = options.get('refuse_special_tokens', False)
        if self.max_length < 1:
            raise ValueError(f'max_length must be at least 1, got {self.max_length}')
        if self.truncation_strategy not in get_args(TruncationStrategy):
            allowed = ', '.join(get_args(TruncationStrategy))
            raise ValueError(f'truncation_strategy must be one of {allowed}, got {self.truncation_strategy!r}')
        access = {name: options.get(name, True) for name in ('is_private_allowed', 'is_move_allowed')}
        folder = resolve_tokenizer(model_id, **access)
        self.tokenizer = ChatTokenizer(folder)
        """Converts text to token ids and back."""
        source = read_chat_template(folder, self.tokenizer.settings)
        self._chat_template: ChatTemplate | None = None
        if options.get('use_chat_template', True):
            if source is None:
                raise TemplateError(
                    f'{model_id} has no chat template; pass use_chat_template=False to concatenate plain texts'
                )
            self._chat_template = ChatTemplate(source, special_tokens=self.tokenizer.special_tokens)
        super().__init__(folder if options.get('is_media_read', True) else None, self.tokenizer)
        default_parser = 'hermes' if self._mentions('<tool_call>') else 'json'
        parser = options.get('tool_call_parser', default_parser)
        self.tool_call_parser = TOOL_CALL_PARSERS.parser(parser) if isinstance(parser, str) else parser
        """Finds tool calls in the model's output."""

    @cached_property
    def opens_thought(self) -> bool:
        """Whether the generation prompt ends with `<think>`, so that sampled text begins inside the thought."""
        question = cast('Trajectory', {'messages': [{'role': 'user', 'content': '.'}]})
        try:
            text = self._render(question, add_generation_prompt=True).text
        except TemplateError:
            return False
        return text.rstrip().endswith(THINK_OPEN)

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template writes the trajectory's tools into the prompt."""
        return self._mentions('tools')

    @property
    def renders_date(self) -> bool:
        """Whether the chat template may write today's date into the prompt."""
        return self._mentions('strftime_now')

    def format_trajectory(self, trajectory: Mapping[str, Any]) -> Trajectory:
        """Return a validated copy with the default system message and with thinking in the chat template's format.

        Raises:
            InvalidTrajectory: a field is malformed. The error names it, such as `messages[1].role`.
        """
        given = trajectory
        if self._media is not None:
            # The formatted chat contains special tokens for media, so `given` is searched for special texts.
            trajectory = self._media.formatted(trajectory)
        messages = check_trajectory(trajectory, is_media_read=self.is_mm)
        is_plain = is_text(trajectory)
        messages = messages if is_plain else with_system(messages, self.default_system)
        tools = check_tools(trajectory.get('tools'))
        if self.refuse_special_tokens:
            check_special_texts(given, self.tokenizer.special_texts)
        has_field, is_opened = self._mentions('reasoning_content'), self.opens_thought
        formatted: dict[str, Any] = dict(trajectory)
        formatted['messages'] = [
            message if is_plain else with_thinking(message, has_reasoning_field=has_field, is_opened=is_opened)
            for message in messages
        ]
        if tools:
            formatted['tools'] = tools
        return cast('Trajectory', formatted)

    def render(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a chat before tokenization.

        Args:
            trajectory: the chat.
            add_generation_prompt: whether to end the text with the opening of an assistant turn. Default: False.

        Raises:
            InvalidTrajectory: a field is malformed. The error names it, such as `messages[1].role`.
            TemplateError: the chat template refuses the chat.
        """
        return self._render(self.format_trajectory(trajectory), add_generation_prompt=add_generation_prompt).text

    def encode(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool = False) -> InputFeature:
        """Return one chat as one feature.

        Args:
            trajectory: the chat.
            add_generation_prompt: whether to end with the opening of an assistant turn, without labels, for sampling.
                Default: False.

        Returns:
            int32 numpy arrays of shape [T]: `input_ids`, `attention_mask`, `position_ids` and, except for prompts,
            `labels`. Chats with images or videos have `position_ids` of shape [3, T]. Media add further fields.

        Raises:
            InvalidTrajectory: a field is malformed. The error names it, such as `messages[1].role`.
            ExampleTooLong: the chat has more than `max_length` tokens and must not be cut. This applies to every chat
                under 'raise', to prompts under 'right' and 'split', and to chats with media under all strategies except
                'delete'.
            TemplateError: the chat template refuses the chat, a library for media is missing, or the chat does not give
                exactly one feature ('split' may give several, and 'delete' none); use `batch_encode` for such chats.
        """
        features = self.batch_encode([trajectory], add_generation_prompt=add_generation_prompt)
        if len(features) != 1:
            raise TemplateError(f'the example gave {len(features)} features instead of one; use batch_encode')
        return features[0]

    def batch_encode(
        self, trajectories: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> list[InputFeature]:
        """Return the features of all chats, in order; 'split' may give more features than chats and 'delete' fewer.

        Raises:
            InvalidTrajectory: as in `encode`, for the first invalid chat.
            ExampleTooLong: as in `encode`.
            TemplateError: the chat template refuses a chat, or a library for media is missing.
        """
        chats = self.encode_chats(trajectories, add_generation_prompt=add_generation_prompt)
        return [feature for chat in chats for feature in chat.features]

    def encode_chats(
        self, trajectories: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False
    ) -> list[EncodedChat]:
        """Return one `EncodedChat` per chat, in order.

        Raises:
            InvalidTrajectory: as in `encode`, for the first invalid chat.
            ExampleTooLong: as in `encode`.
            TemplateError: the chat template refuses a chat, or a library for media is missing.
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
                tokens = self._media.expanded(tokens, media)  # noqa: PLW2901 - the same chat with its media tokens
            # Finding the assistant's turns is the most expensive step, so chats that will be dropped skip it.
            is_kept = self._keeps(len(tokens.token_ids), is_prompt=add_generation_prompt, is_media=bool(media))
            spans = self._spans(chat, text) if is_kept and not add_generation_prompt else ()
            pieces = self._fit(tokens, spans) if is_kept else []
            features = [self._feature(ids, labels, chat, is_prompt=add_generation_prompt) for ids, labels in pieces]
            encoded.append(EncodedChat([self._with_media(one, media) for one in features], len(tokens.token_ids)))
        return encoded

    def check(self, trajectory: Mapping[str, Any]) -> str | None:
        """Return the reason why a chat is not usable for training, or None if the chat is usable."""
        try:
            features = self.batch_encode([trajectory])
        except TemplateError as error:
            return str(error)
        if not features:
            return f'the chat has more than max_length {self.max_length} tokens and would be left out'
        if all((np.asarray(feature['labels']) == IGNORE_INDEX).all() for feature in features if 'labels' in feature):
            return 'the chat has no labels: it has no assistant message, or truncation removed it'
        if any(message.get('tool_calls') for message in trajectory['messages']) and not self._mentions('tool_calls'):
            return 'the tool calls have no labels: the chat template does not render them'
        return None

    def batch_check(self, trajectories: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return the result of `check` for each chat, in order."""
        return [self.check(trajectory) for trajectory in trajectories]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in token_ids]

    def concat_input_feature(self, prompt_feature: InputFeature, new_tokens: Sequence[int]) -> InputFeature:
        """Return the prompt followed by a completion, with labels for the completion; no token is changed.

        Values of earlier turns in the prompt are kept: `labels`, `completion_mask` (derived from the labels if the
        prompt has no mask), and per-token values such as `old_logps`. For the new tokens, per-token values are 0.0
        and `loss_weights` are 1.0 until the caller sets them.

        Args:
            prompt_feature: a feature of T tokens.
            new_tokens: N token ids, at least 0.

        Returns:
            A new feature of T + N tokens; the prompt's arrays are copied.

        Raises:
            InvalidFeature: a field has the wrong shape, or contains values other than token ids where these are
                required. The error names the field.
        """
        return continued(prompt_feature, new_tokens)

    def parse_tool_call(self, text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
        """Return the tool calls in a sampled turn, in order, in the form of a message's `tool_calls`.

        Accepts any text and never raises. Incomplete and malformed calls are ignored, and so are calls inside the
        model's thought. If the prompt opens the thought and the text does not close it, the whole text is the thought.

        Args:
            text: the sampled text.
            tools: the tools offered to the model. Needed for Qwen3.5, whose calls do not state the types of their
                arguments; without a declared type an argument is a string. Default: none.

        Returns:
            The calls; their ids are `call00000`, `call00001`, ...
        """
        return calls_of(self._calls(text, tools))

    def clean_tool_call(self, text: str) -> str:
        """Return a sampled turn without the calls that `parse_tool_call` finds; text without calls is unchanged."""
        return text_without(text, self._calls(text, ()))

    def _calls(self, text: str, tools: Sequence[Tool]) -> list[FoundCall]:
        if self.opens_thought and THINK_CLOSE not in text:
            return []  # The prompt opened the thought and the text does not close it.
        thinking = thought(text, is_opened=self.opens_thought)
        begin = thinking[1] if thinking else 0
        # Replacing the thought with spaces keeps the character positions.
        return list(self.tool_call_parser.find(' ' * begin + text[begin:], tools))

    def _mentions(self, name: str) -> bool:
        return self._chat_template is not None and self._chat_template.mentions(name)

    def _refuse_far_too_long(self, text: str) -> None:
        """Raise `ExampleTooLong` under 'raise' if even the lower bound of the token count exceeds `max_length`."""
        lower_bound = self.tokenizer.min_token_count(text) if self.truncation_strategy == 'raise' else 0
        if lower_bound > self.max_length:
            raise ExampleTooLong(lower_bound, self.max_length)

    def _keeps(self, count: int, *, is_prompt: bool, is_media: bool) -> bool:
        """Return whether a chat of `count` tokens gives any feature.

        Raises:
            ExampleTooLong: the chat is too long and must not be cut.
        """
        strategy = self.truncation_strategy
        if count <= self.max_length or (strategy == 'left' and not is_media):
            return True
        # 'right' and 'split' would remove the opening of the turn at the end of a prompt; media are never cut.
        if strategy == 'raise' or ((is_prompt or is_media) and strategy != 'delete'):
            raise ExampleTooLong(count, self.max_length)
        return strategy != 'delete'

    def _render(self, chat: Trajectory, *, add_generation_prompt: bool) -> RenderedChat:
        messages = cast('list[Any]', chat.get('messages', []))
        if self._media is not None:
            messages = self._media.with_media_tokens(messages)
        if is_text(chat):
            return joined_texts(messages, begin=self.tokenizer.text_opening, end=self.tokenizer.text_end)
        if self._chat_template is None:
            return joined_texts(messages)
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=chat.get('tools'),
            enable_thinking=self.enable_thinking,
        )

    def _spans(self, chat: Trajectory, rendered: RenderedChat) -> Sequence[Span]:
        is_weighted = any(message.get('weight') == 0 for message in chat.get('messages', []))
        if self._chat_template is None or is_text(chat) or (self._chat_template.marks_generation and not is_weighted):
            return rendered.generated

        def render(messages: Any, *, add_generation_prompt: bool) -> str:
            changed = cast('Trajectory', {**chat, 'messages': messages})
            return self._render(changed, add_generation_prompt=add_generation_prompt).text

        special_texts = self.tokenizer.special_texts
        return assistant_spans(chat.get('messages', []), rendered.text, render=render, special_texts=special_texts)

    def _fit(self, tokens: TokenizedText, spans: Sequence[Span]) -> list[tuple[IntVector, IntVector]]:
        """Return `(input_ids, labels)` pieces of at most `max_length` tokens, with labels shifted within each piece."""
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
        messages = [dict(message) for message in chat.get('messages', [])]
        for message in messages:
            message.pop('weight', None)
        feature = InputFeature(messages=messages)
        feature.update(token_fields(ids))
        if not is_prompt:
            feature['labels'] = labels
        if chat.get('user_data'):
            feature['user_data'] = chat.get('user_data', [])
        return feature
