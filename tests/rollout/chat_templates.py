"""A chat template in which the next role's token ends a reply, as in GLM 4.5, and a tokenizer that knows the special
tokens of all families, for tests."""

import copy

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.stages.rollout.text.tokenizer import PromptTokenizer

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
