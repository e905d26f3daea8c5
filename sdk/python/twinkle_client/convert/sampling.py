"""Conversion of sampling requests; responses are converted in `twinkle_client.sampler.results`."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import numpy as np
from google.protobuf import duration_pb2

from twinkle.api.sampler.v1 import sampling_pb2 as pb
from twinkle.data_format import PromptProbe, SamplingParams, StructuredOutput
from twinkle_client.convert.config import struct
from twinkle_client.convert.tensors import tensor_to_proto, vector
from twinkle_client.convert.trajectories import trajectory_to_proto

SCHEME = 'twinkle://'


def sampling_params(
    params: SamplingParams | Mapping[str, Any] | None, *, num_samples: int | None = None
) -> pb.SamplingParams:
    """Return the message of sampling parameters.

    Args:
        params: Parameters; None for the defaults.
        num_samples: Overrides the number of samples in `params`.

    Raises:
        ValueError: A name is unknown or a value is out of range.
    """
    values = params if isinstance(params, SamplingParams) else SamplingParams.from_dict(params or {})
    if num_samples is not None:
        values = replace(values, num_samples=num_samples)
    return pb.SamplingParams(
        max_tokens=values.max_tokens,
        min_tokens=values.min_tokens,
        seed=values.seed,
        stop_strings=values.stop_strings,
        stop_token_ids=values.stop_token_ids,
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        repetition_penalty=values.repetition_penalty,
        top_logprob_count=values.logprobs,
        is_prompt_logprobs_returned=values.prompt_logprobs is not None,
        prompt_top_logprob_count=values.prompt_logprobs,
        sample_count=values.num_samples,
        is_eos_ignored=values.ignore_eos,
        min_p=values.min_p,
        presence_penalty=values.presence_penalty,
        frequency_penalty=values.frequency_penalty,
        structured_output=_structured_output(values.structured_output),
        prompt_probe=_probe(values.prompt_probe) if values.prompt_probe else None,
        is_routed_experts_returned=values.return_routed_experts,
    )


def _probe(probe: PromptProbe) -> pb.PromptProbe:
    targets = probe.target_token_ids
    return pb.PromptProbe(
        target_token_ids=None if targets is None else tensor_to_proto(targets.astype(np.int32)),
        draw_count=probe.draw_count,
        is_embedding_returned=probe.is_embedding_returned,
    )


def _structured_output(form: StructuredOutput | None) -> pb.StructuredOutput | None:
    if form is None:
        return None
    if form.json_schema is not None:
        return pb.StructuredOutput(json_schema=struct(form.json_schema, field='structured_output.json_schema'))
    if form.choices is not None:
        return pb.StructuredOutput(choices=pb.TextChoices(texts=form.choices))
    if form.regex is not None:
        return pb.StructuredOutput(regex=form.regex)
    if form.grammar is not None:
        return pb.StructuredOutput(grammar=form.grammar)
    return pb.StructuredOutput(is_json_object=True)


def adapter_ref(
    adapter: str, *, version: int | None, min_version: int | None, wait: timedelta | None = None
) -> pb.AdapterRef | None:
    """Return the reference to the weights to sample from, or None for the base model.

    Args:
        adapter: Adapter id, `twinkle://` path of a checkpoint, or empty for the base model.
        version: Exact version.
        min_version: Oldest acceptable version.
        wait: Maximum time that the sampler waits for the version.

    Raises:
        ValueError: A version is given without an adapter or for a checkpoint, or `version` and `min_version` are both
            given.
    """
    is_checkpoint = adapter.startswith(SCHEME)
    if version is not None and min_version is not None:
        raise ValueError('version and min_version cannot be combined; pass one of them')
    if (version is not None or min_version is not None) and (not adapter or is_checkpoint):
        problem = 'leave it out for a checkpoint' if is_checkpoint else 'pass adapter_name'
        raise ValueError(f'a version requires an adapter that publishes versions; {problem}')
    if not adapter:
        return None
    timeout = None
    if wait is not None:
        timeout = duration_pb2.Duration()
        timeout.FromTimedelta(wait)
    if is_checkpoint:
        return pb.AdapterRef(checkpoint_path=adapter, wait_timeout=timeout)
    if version is not None:
        return pb.AdapterRef(adapter_id=adapter, exact=version, wait_timeout=timeout)
    if min_version is not None:
        return pb.AdapterRef(adapter_id=adapter, at_least=min_version, wait_timeout=timeout)
    return pb.AdapterRef(adapter_id=adapter, wait_timeout=timeout)


def prompt_to_proto(prompt: Any, *, is_thinking_enabled: bool | None = None) -> pb.Prompt:
    """Return the message of a prompt given as text, token ids, a chat or a feature.

    Raises:
        ValueError: The prompt has none of these types, or has no tokens.
    """
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        fields = cast(Mapping[str, Any], prompt)
        if fields.get('input_ids') is None:
            chat = pb.ChatPrompt(trajectory=trajectory_to_proto(fields), is_thinking_enabled=is_thinking_enabled)
            return pb.Prompt(chat=chat)
        prompt = fields['input_ids']
    token_ids = vector(prompt, np.int32, field='prompt')
    if not len(token_ids):
        raise ValueError('prompt: at least one token is required')
    return pb.Prompt(token_ids=tensor_to_proto(token_ids))
