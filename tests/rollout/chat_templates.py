"""Chat templates with the habits of the published ones, and a tokenizer that knows their special tokens, for tests.

Llama 3 trims, and allows one call at a time. GLM 4 has no token that ends a reply: the next role's token does. DeepSeek V3 writes no
turn markers behind tool results, and wants arguments as text and a content of None beside them.
"""

import copy

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.stages.rollout.text.tokenizer import PromptTokenizer

LLAMA3 = """
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls|length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

GLM4 = """
{{- '[gMASK]<sop>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- ('\\n' if message.content or not loop.first else '') + '<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}{{ value if value is string else value | tojson }}{{ '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{%- endif %}"""

DEEPSEEK = """
{%- set ns = namespace(after_tool=false) %}
{{- '<｜begin▁of▁sentence｜>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{ message.content }}
    {%- elif message.role == 'user' %}
        {%- if ns.after_tool %}{{ '<｜tool▁outputs▁end｜>' }}{%- endif %}
        {%- set ns.after_tool = false %}{{ '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' and message.content is none %}
        {{- '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' }}{{ '<｜tool▁calls▁begin｜>' }}
        {%- set ns.after_tool = false %}
        {%- for call in message.tool_calls %}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' }}{{ message.content + '<｜end▁of▁sentence｜>' }}
        {%- set ns.after_tool = false %}
    {%- elif message.role == 'tool' %}
        {%- if not ns.after_tool %}{{ '<｜tool▁outputs▁begin｜>' }}{%- endif %}
        {%- set ns.after_tool = true %}{{ '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' }}{%- endif %}"""

SPECIAL = [
    *("<|im_start|>", "<|im_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
]
TAGS = [  # one token each, but ordinary text
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
]
PAIRS = ["ll", "er", "11"]  # so that a text can be tokenised in another way than the model wrote it


def chat_tokenizer(template: str | None) -> PromptTokenizer:
    """One token per character and per special token; it merges PAIRS."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", *characters, *PAIRS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(PAIRS) + r"|[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens(TAGS)
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", clean_up_tokenization_spaces=False)
    fast.chat_template = template
    tokenizer = PromptTokenizer.__new__(PromptTokenizer)  # from memory: its constructor wants a directory
    tokenizer.inner, tokenizer.apply_chat_template = fast, True
    return tokenizer


def with_template(tokenizer: PromptTokenizer, template: str) -> PromptTokenizer:
    """The same tokenizer with another template."""
    other = PromptTokenizer.__new__(PromptTokenizer)
    other.__dict__ = {**tokenizer.__dict__, "inner": copy.deepcopy(tokenizer.inner)}
    other.inner.chat_template = template
    return other
