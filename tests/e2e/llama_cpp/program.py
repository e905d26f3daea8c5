"""Continues prompts with llama.cpp: `program.py <GGUF file> <text> <number of tokens> <prompt> ...`.

Prints a JSON object with the tokens of the text and the most probable continuation of each prompt, a list of tokens.
"""

import json
import sys
import urllib.request
from typing import Any

import xllamacpp  # pyright: ignore[reportMissingImports]


def start(file: str) -> Any:
    """Start the server of llama.cpp in this process, with all computation in the precision of the file."""
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads, params.warmup = 512, 1, 1, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # Flash attention rounds keys and values to float16.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def main(file: str, text: str, count: str, *prompts: str) -> None:
    """Print the results."""
    server = start(file)

    def ask(path: str, **body: Any) -> Any:
        data, headers = json.dumps(body).encode(), {'content-type': 'application/json'}
        with urllib.request.urlopen(urllib.request.Request(f'{server.listening_address}/{path}', data, headers)) as got:
            return json.load(got)

    options = {'n_predict': int(count), 'temperature': 0, 'return_tokens': True, 'cache_prompt': False}
    results = {
        'text': ask('tokenize', content=text, add_special=False)['tokens'],
        'continuations': [ask('completion', prompt=json.loads(prompt), **options)['tokens'] for prompt in prompts],
    }
    json.dump(results, sys.stdout)


if __name__ == '__main__':
    main(*sys.argv[1:])
