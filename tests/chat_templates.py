"""A tokenizer with chat templates, in the file format of checkpoints."""

import json

import pytest

from jrl.models.file_tokenizer import load_tokenizer

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "[INST]", "[/INST]"]
SPECIAL += ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"]
SPECIAL += ["[/AVAILABLE_TOOLS]"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]

QWEN = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content.split('</think>')[-1].lstrip('\\n') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- set last = loop.last or messages[loop.index0 + 1].role != 'tool' %}
{%- if last %}{{- '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
LLAMA = """
{%- for message in messages %}
{%- if message.tool_calls %}
{{- '<|im_start|>assistant<|im_start|>\\n\\n{"name": "' }}
{{- message.tool_calls[0].function.name }}
{{- '", "parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- '}<|eot|>' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>ipython<|im_start|>\\n\\n' }}{{- message.content | tojson }}{{- '<|eot|>' }}
{%- else %}
{{- '<|im_start|>' + message.role + '<|im_start|>\\n\\n' }}{{- message.content | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_start|>\\n\\n' }}{% endif %}
"""
MISTRAL = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] and (loop.last or users | length == 1) %}
{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{{- call.function | tojson }}{% endfor %}{{- ']<|eot|>' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}
{{- raise_exception("ids have 9 characters") }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + message.content + '}[/TOOL_RESULTS]' }}
{%- else %}{{- ' ' + message.content + '<|eot|>' }}{%- endif %}
{%- endfor %}
"""
GEMMA = """
{%- for message in messages %}
{%- if message.role not in ['user', 'assistant'] %}{{- raise_exception("roles") }}{% endif %}
{{- '<|im_start|>' + ('model' if message.role == 'assistant' else 'user') + '\\n' }}
{{- message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{% endif %}
"""
# As gpt-oss's: results are named, earlier turns end otherwise, thinking is shown in the last only.
HARMONY = """
{%- if tools %}{{ '<|im_start|>developer[INST]' }}{{ tools | tojson }}{{ '[/INST]' }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set last.name = message.tool_calls[0].function.name %}
{{- message.thinking or message.content }}{{- '<|im_start|>assistant to=' + last.name + '[INST]' }}
{{- message.tool_calls[0].function.arguments | tojson }}{{- '<|eot|>' }}
{%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
{{- message.thinking or '' }}
{{- '<|im_start|>assistant[INST]' + message.content + '<|im_end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>' + last.name + ' to=assistant[INST]' }}
{{- message.content | tojson }}{{ '[/INST]' }}
{%- else %}{{- '<|im_start|>' + message.role + '[INST]' + message.content + '[/INST]' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{% endif %}
"""
# As llama.cpp's of DeepSeek R1: a generator is written as JSON, calls have no content and arguments
# as text, and only the first results of a conversation are opened.
R1 = """
{%- set ns = namespace(first=true, open=false) %}
{%- if tools %}{{ tools | map(attribute='function') | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
{%- if message.role != 'tool' and ns.open %}{{ '[/TOOL_RESULTS]<|eot|>' }}
{%- set ns.open = false %}{% endif %}
{%- if message.role == 'user' %}{{ '[INST]' + message.content + '<|eot|>' }}
{%- elif message.role == 'assistant' and message.content is none %}
{{- '[/INST][TOOL_CALLS]' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '\\n' + call.function.arguments }}{% endfor %}{{ '<|eot|>' }}
{%- elif message.role == 'assistant' %}{{ '[/INST]' + message.content + '<|eot|>' }}
{%- elif message.role == 'tool' %}
{%- if ns.first %}{{ '[TOOL_RESULTS]' }}{% set ns.first = false %}{% endif %}
{%- set ns.open = true %}{{ '\\n[AVAILABLE_TOOLS]' + message.content }}
{%- endif %}
{%- endfor %}
{%- if ns.open %}{{ '[/TOOL_RESULTS]<|eot|>' }}{% endif %}
{%- if add_generation_prompt %}{{ '[/INST]' }}{% endif %}
"""
TEMPLATES = {
    "harmony": HARMONY,
    "r1": R1,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    """make(template) -> the tokenizer, byte-level BPE with control tokens, special and not."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["It is 42. What is it? user assistant tool", '{"name": "look", "arguments": {}}']
    backend.train_from_iterator(texts, trainer)
    backend.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in ADDED])

    def make(template):
        directory = tmp_path_factory.mktemp("chat")
        backend.save(str(directory / "tokenizer.json"))
        settings = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
        settings["chat_template"] = TEMPLATES.get(template, template)
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        stops = [backend.token_to_id(t) for t in ("<|im_end|>", "<|eot|>")]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
        return load_tokenizer(directory)

    return make
