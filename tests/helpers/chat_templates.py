"""Chat templates in the manner of public ones, and chats as they write them.

In the texts a span of the assistant, marked by hand, is between guillemets.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Written(NamedTuple):
    template: str
    text: str
    special_tokens: dict[str, str] = {}


#: two turns, with a system prompt
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Three."},
]
BOS, EOS = {"bos_token": "<s>"}, {"eos_token": "</s>"}

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CHATML_TEXT = """\
<|im_start|>system
Be brief.<|im_end|>
<|im_start|>user
One and one?<|im_end|>
<|im_start|>assistant
«Two.<|im_end|>»
<|im_start|>user
And one?<|im_end|>
<|im_start|>assistant
«Three.<|im_end|>»
"""

TEMPLATES: dict[str, Written] = {
    "ChatML": Written(CHATML, CHATML_TEXT),
    "ChatML with marks": Written(
        """\
{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + \
'<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}""",
        CHATML_TEXT,
    ),
    "Llama 3": Written(
        """\
{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + \
message['content'] | trim + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
        """\
<|begin_of_text|><|start_header_id|>system<|end_header_id|>

Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>

One and one?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

«Two.<|eot_id|>»<|start_header_id|>user<|end_header_id|>

And one?<|eot_id|><|start_header_id|>assistant<|end_header_id|>

«Three.<|eot_id|>»""",
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "Mistral": Written(
        """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}\
{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}{{ bos_token }}\
{% for message in turns %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}""",
        "<s>[INST] Be brief.\n\nOne and one? [/INST]« Two.</s>»[INST] And one? [/INST]« Three.</s>»",
        BOS | EOS,
    ),
    "Gemma": Written(
        """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}\
{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}\
{% for message in turns %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + \
'\n' + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
        """\
<bos><start_of_turn>user
Be brief.

One and one?<end_of_turn>
<start_of_turn>model
«Two.<end_of_turn>»
<start_of_turn>user
And one?<end_of_turn>
<start_of_turn>model
«Three.<end_of_turn>»
""",
        {"bos_token": "<bos>", "eos_token": "<eos>"},
    ),
    "Zephyr": Written(
        """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token + '\n' }}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}""",
        """\
<|system|>
Be brief.</s>
<|user|>
One and one?</s>
<|assistant|>
«Two.</s>»
<|user|>
And one?</s>
<|assistant|>
«Three.</s>»
""",
        EOS,
    ),
    "Phi 3": Written(  # the end token stands behind the whole chat, and a turn ends with another
        """\
{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
        """\
<|system|>
Be brief.<|end|>
<|user|>
One and one?<|end|>
<|assistant|>
«Two.<|end|>»
<|user|>
And one?<|end|>
<|assistant|>
«Three.<|end|>»
<|endoftext|>""",
        {"eos_token": "<|endoftext|>"},
    ),
    "DeepSeek": Written(
        """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}\
{% elif message['role'] == 'user' %}{{ '<|User|>' + message['content'] }}\
{% else %}{{ '<|Assistant|>' + message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}""",
        "<s>Be brief.<|User|>One and one?<|Assistant|>«Two.</s>»<|User|>And one?<|Assistant|>«Three.</s>»",
        BOS | EOS,
    ),
    "Alpaca": Written(
        """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}\
{% elif message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}\
{% else %}{{ '### Response:\n' + message['content'] + '\n\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}""",
        """\
Be brief.

### Instruction:
One and one?

### Response:
«Two.»

### Instruction:
And one?

### Response:
«Three.»

""",
    ),
    "Vicuna": Written(
        """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}\
{% elif message['role'] == 'user' %}{{ 'USER: ' + message['content'] + ' ' }}\
{% else %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}""",
        "Be brief. USER: One and one? ASSISTANT:« Two.</s>»USER: And one? ASSISTANT:« Three.</s>»",
        EOS,
    ),
}

#: strips the thoughts of all turns but the last
QWEN = """\
{% set last = namespace(user=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}\
{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' }}{% set content = message['content'] %}\
{% if message['role'] == 'assistant' and loop.index0 < last.user %}{{ content.split('</think>')[-1].lstrip('\n') }}\
{% else %}{{ content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
THINKING: list[dict[str, Any]] = [
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "<think>\nadd\n</think>\n\nTwo."},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "<think>\nadd more\n</think>\n\nThree."},
]
THINKING_TEXT = """\
<|im_start|>user
One and one?<|im_end|>
<|im_start|>assistant
Two.<|im_end|>
<|im_start|>user
And one?<|im_end|>
<|im_start|>assistant
«<think>
add more
</think>

Three.<|im_end|>»
"""

#: calls of tools, and their descriptions before all
TOOLS = """\
{% if tools %}{{ '<|tools|>' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] %}{{ message['content'] }}{% endif %}\
{% for call in message['tool_calls'] %}{{ '<call>' + (call | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Add 1 and 1."},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": [1, 1]}]},
    {"role": "tool", "content": "2", "tool_calls": None},
    {"role": "assistant", "content": "It is 2."},
]
TOOL_TEXT = """\
<|tools|>[{"name": "add"}]<|im_end|>
<|im_start|>user
Add 1 and 1.<|im_end|>
<|im_start|>assistant
«<call>{"name": "add", "arguments": [1, 1]}</call><|im_end|>»
<|im_start|>tool
2<|im_end|>
<|im_start|>assistant
«It is 2.<|im_end|>»
"""
