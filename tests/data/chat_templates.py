"""Chat templates in the style of well-known models, and a small tokenizer with their special tokens."""

from __future__ import annotations

from functools import cache

from transformers import PreTrainedTokenizerFast

from millrace.data.tokenizers import train_tokenizer

TOOL_LIST = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
OPENS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + OPENS
HERMES_CALLS = (
    "{% for call in m.tool_calls %}{{ '\n' if m.content or not loop.first else '' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
# Qwen 2.5: a default system message, consecutive tools' messages in one turn of the user.
HERMES = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.\n"
    + TOOL_LIST
    + "<|im_end|>\n{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    + HERMES_CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
) + OPENS
# Qwen 3: only the answer to the last question keeps its reasoning, and has it if it is empty.
THINKING = (
    "{% set last = namespace(index=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set last.index = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% set text = m.content or '' %}{% set reason = '' %}{% if '</think>' in text %}"
    "{% set reason = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > last.index and (loop.last or reason) %}<think>\n"
    "{{ reason }}\n</think>\n\n{% endif %}"
    "{{ text }}"
    + HERMES_CALLS
    + "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}"
) + OPENS
# Llama 3.1: contents are trimmed, and a turn calls one tool.
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eom_id|>"
    "{% else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Mistral: roles alternate, a call has no content, and its id has nine characters.
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('id') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for call in m.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('id') }}{% endif %}{% if not loop.first %}, {% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% endfor %}]</s>'
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>"
    "{% else %}{{ raise_exception('only user, assistant and tool') }}{% endif %}{% endfor %}"
)
# DeepSeek V3: only a message without content calls, with arguments as text.
DEEPSEEK = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.content is not string %}<｜Assistant｜><｜tool▁calls▁begin｜>"
    "{% for call in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}\n"
    "```json\n"
    "{{ '' + call.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜></s>"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}</s>"
    "{% else %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
# gpt-oss: the last answer ends otherwise than those before it.
HARMONY = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant"
    "<|channel|>commentary<|message|>{{ m.content }}<|end|>{% elif m.tool_calls %}<|start|>assistant"
    "<|channel|>commentary to=functions.{{ m.tool_calls[0].function.name }} <|constrain|>json<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# GLM: nothing closes a turn but the role that comes next.
GLM = (
    "[gMASK]<sop>{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n<tool_response>\n"
    "{{ m.content }}\n</tool_response>{% else %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{% for call in m.tool_calls %}\n<tool_call>{{ call.function.name }}\n"
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>\n"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n{% endfor %}</tool_call>"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CODER = HERMES.replace(
    HERMES_CALLS,
    "{% for call in m.tool_calls %}{{ '\n' if m.content or not loop.first else '' }}<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for key, value in call.function.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}",
)
TEMPLATES = {
    "chatml": CHATML,
    "hermes": HERMES,
    "thinking": THINKING,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
    "gpt-oss": HARMONY,
    "glm": GLM,
    "qwen3_coder": CODER,
}
SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<|start|>", "<|end|>"),
    *("<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "[gMASK]", "<sop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
]
# Added tokens that are not special: decoded text has them.
ADDED = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
]
CORPUS = ["The answer is three, and then the other one is found: calc(1 + 2)\n"] * 4


@cache
def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges, the tokens above, and a template by its name."""
    made = train_tokenizer(CORPUS, vocab_size=330, across_words=False)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.add_tokens(ADDED)
    made.chat_template = None if template is None else TEMPLATES[template]
    return made
