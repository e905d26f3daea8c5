"""Load a saved adapter with plain transformers and peft, and print the model's answer to a question.

python -m examples.load_in_peft FOLDER --model smollm2-135m-instruct --ask 'Who are you?'
"""

import argparse

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle.hub import resolve_model


def main() -> None:
    """Print the greedy answer to the question."""
    parser = argparse.ArgumentParser(prog='python -m examples.load_in_peft', description=__doc__)
    parser.add_argument('folder', help='folder with adapter_config.json and adapter_model.safetensors')
    parser.add_argument('--model', required=True, help='base model')
    parser.add_argument('--ask', default='Who are you?', help='question (default: %(default)s)')
    options = parser.parse_args()
    base = resolve_model(options.model)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), options.folder)
    chat = [{'role': 'user', 'content': options.ask}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors='pt', return_dict=True)
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(tokens[0, inputs['input_ids'].shape[1] :], skip_special_tokens=True))


if __name__ == '__main__':
    main()
