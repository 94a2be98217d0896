"""Loss masks of SFT: for the templates of all families exactly the model's text is trained, and the rendered text is
unchanged."""

import logging
import random
from typing import Any

import pytest
from chat_templates import chat_tokenizer
from sft_templates import DEEPSEEK_R1, FAMILIES, GLM4, GLM47, LLAMA31, QWEN3, QWEN3_THINKING_2507, QWEN25

from penstock.stages.rollout.prompts.source import Prompt
from penstock.stages.rollout.sft_data import sft_samples
from penstock.stages.rollout.text.loss_masks import MARK, split_trained_text
from penstock.stages.rollout.text.templates import Messages
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.errors import DataError, TemplateError

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
every_family = pytest.mark.parametrize("family", FAMILIES)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def calling(arguments: Any, number: int = 0) -> dict[str, Any]:
    call = {"id": f"functions.add:{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return answer("", tool_calls=[call])


def result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"functions.add:{number}"}


SYSTEM = {"role": "system", "content": "you add"}
PLAIN: Messages = [user("1+1?"), answer("2"), user("and 2+2?"), answer("4")]
THINKING: Messages = [
    user("1+1?"),
    answer("<think>\none more\n</think>\n\n2"),
    user("2+2?"),
    answer("<think>\ntwo more\n</think>\n\n4"),
]
AGENT: Messages = [
    SYSTEM,
    user("1+1?"),
    calling({"a": 1, "b": "one"}),
    result("2"),
    answer("it is 2"),
    user("thanks"),
    answer("bye"),
]


def trained(tokenizer: PromptTokenizer, messages: Messages, tools: Any = None) -> list[str]:
    """The trained pieces; their text is checked to be the template's own."""
    pieces = split_trained_text(messages, tokenizer, tools)
    try:
        [text] = tokenizer.render_chats([messages], add_generation_prompt=False, tools=[tools])
    except TemplateError:  # of arguments in another form
        text = None
    assert text is None or "".join(piece for piece, _ in pieces) == text
    return [piece for piece, is_trained in pieces if is_trained]


def marked(tokenizer: PromptTokenizer, messages: Messages, tools: Any = None) -> list[str]:
    """What the template itself says is generated."""
    [text] = tokenizer.render_chats(
        [messages], add_generation_prompt=False, tools=[tools], options={"a": MARK, "z": MARK}
    )
    return text.split(MARK)[1::2]


def for_family(family: str, messages: Messages) -> Messages:
    """Calls as the family wants them: DeepSeek's arguments as text, Moonlight without tools."""
    if family == "moonlight":
        return [message for message in messages if message["role"] != "tool" and not message.get("tool_calls")]
    if not family.startswith("deepseek"):
        return messages
    return [
        calling('{"a": 1}', int(message["tool_calls"][0]["id"].rpartition(":")[2]))
        if message.get("tool_calls")
        else message
        for message in messages
    ]


@every_family
@pytest.mark.parametrize("messages", [PLAIN, THINKING, AGENT], ids=["plain", "thinking", "agent"])
def test_every_answer_is_trained_exactly(family: str, messages: Messages) -> None:
    tokenizer, messages = chat_tokenizer(FAMILIES[family]), for_family(family, messages)
    expected = marked(tokenizer, messages, TOOLS)
    assert len(expected) == sum(message["role"] == "assistant" for message in messages)
    assert trained(tokenizer, messages, TOOLS) == expected


def random_conversation(generator: random.Random, family: str) -> Messages:
    """A conversation of several questions, with calls, thoughts in both spellings, odd white space and words of the
    templates."""
    words = ["2", "a\n\nb", "two\n", "think", "assistant\n", "", "<b>", 'it\'s "so"', "Ünïcode 漢字", "{}", "\n3"]
    messages: Messages = [SYSTEM] if generator.random() < 0.5 else []
    for _ in range(generator.randint(1, 3)):
        messages.append(user(generator.choice(words) + "?"))
        for number in range(generator.randint(0, 2)):
            messages += [
                calling({"a": generator.choice(words), "b": generator.randint(0, 9)}, number),
                result("r", number),
            ]
        text = generator.choice(words) + "."
        thoughts = generator.choice(["", "", "hm\nhm"])
        spelling = generator.random() < 0.5
        messages.append(
            answer(f"<think>\n{thoughts}\n</think>\n\n{text}" if thoughts and spelling else text)
            | ({"reasoning_content": thoughts} if thoughts and not spelling else {})
        )
    return for_family(family, messages)


def check_random_conversations(family: str, count: int) -> None:
    tokenizer, generator = chat_tokenizer(FAMILIES[family]), random.Random(f"masks of {family}")
    for _ in range(count):
        messages = random_conversation(generator, family)
        assert trained(tokenizer, messages, TOOLS) == marked(tokenizer, messages, TOOLS), messages


@every_family
def test_random_conversations_are_trained_exactly(family: str) -> None:
    check_random_conversations(family, 2)


@pytest.mark.full
@every_family
def test_many_random_conversations_are_trained_exactly(family: str) -> None:
    check_random_conversations(family, 200)


def test_trained_text_by_template() -> None:
    """The same by hand, for the templates that render a conversation differently once it continues."""
    assert trained(chat_tokenizer(QWEN3), THINKING) == ["2<|im_end|>", "<think>\ntwo more\n</think>\n\n4<|im_end|>"]
    assert trained(chat_tokenizer(QWEN3), PLAIN) == ["2<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]
    assert trained(chat_tokenizer(QWEN3_THINKING_2507), THINKING) == [
        "2<|im_end|>",
        "two more\n</think>\n\n4<|im_end|>",
    ]
    assert trained(chat_tokenizer(GLM47), THINKING) == ["2<|user|>", "two more</think>4"]
    assert trained(chat_tokenizer(DEEPSEEK_R1), PLAIN) == ["2<｜end▁of▁sentence｜>", "4<｜end▁of▁sentence｜>"]
    assert trained(chat_tokenizer(QWEN25), AGENT, TOOLS)[0] == (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "one"}}\n</tool_call><|im_end|>'
    )


def test_thinking_switched_off_is_part_of_the_prompt() -> None:
    tokenizer = chat_tokenizer(QWEN3)
    tokenizer.template_options = {"enable_thinking": False}
    assert trained(tokenizer, PLAIN) == ["2<|im_end|>", "4<|im_end|>"]


@every_family
def test_step_loss_mask_leaves_a_turn_untrained(family: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    expected = trained(tokenizer, PLAIN)
    assert trained(tokenizer, [PLAIN[0], {**PLAIN[1], "step_loss_mask": 0}, *PLAIN[2:]]) == expected[1:]
    assert trained(tokenizer, [*PLAIN[:3], {**PLAIN[3], "step_loss_mask": 0}]) == expected[:1]
    assert trained(tokenizer, [{**message, "step_loss_mask": 1} for message in PLAIN]) == expected
    with pytest.raises(DataError, match=r"row 0 of file 1.* trains no token"):
        sft_samples([prompt([{**message, "step_loss_mask": 0} for message in PLAIN])], tokenizer, 0)


def test_invalid_step_loss_mask_raises() -> None:
    with pytest.raises(DataError, match="step_loss_mask"):
        trained(chat_tokenizer(QWEN3), [user("a"), answer("b", step_loss_mask=0.5)])


def prompt(messages: Messages, row: int = 0) -> Prompt:
    return Prompt(issue=0, epoch=0, file=0, row=row, content=messages, label="", metadata={})


def test_fields_that_parquet_adds_do_not_reach_the_template() -> None:
    """Llama's template asks whether a message has `tool_calls`; in rows of Parquet every message has."""
    messages = [{**message, "tool_calls": None, "step_loss_mask": None} for message in PLAIN]
    assert trained(chat_tokenizer(LLAMA31), messages) == ["2<|eot_id|>", "4<|eot_id|>"]


@every_family
def test_calls_are_rendered_in_form_that_template_accepts(family: str) -> None:
    if family == "moonlight":
        pytest.skip("its template writes no calls")
    tokenizer = chat_tokenizer(FAMILIES[family])
    for arguments in ({"a": 1}, '{"a": 1}'):
        pieces = trained(tokenizer, [user("1+1?"), calling(arguments), result("2"), answer("2")], TOOLS)
        assert len(pieces) == 2 and "1" in pieces[0]


BLOCKS = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def test_generation_blocks_of_template_are_trusted() -> None:
    tokenizer = chat_tokenizer(BLOCKS)
    assert trained(tokenizer, PLAIN) == ["2<|im_end|>", "4<|im_end|>"]
    assert trained(tokenizer, [PLAIN[0], {**PLAIN[1], "step_loss_mask": 0}, *PLAIN[2:]]) == ["4<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        # marks are changed too
        "{% for message in messages %}{{ message.role + ': ' + message.content | upper }}{% endfor %}",
        "{% for message in messages %}{{ message.content | length }} {% endfor %}",
        "{% for message in messages if message.role != 'assistant' %}{{ message.content }}{% endfor %}",
        "{% for message in messages %}{{ 'x' if message.content == '2' else message.content }}{% endfor %}",
    ],
)
def test_template_whose_answers_cannot_be_located_raises_with_row(template: str) -> None:
    with pytest.raises(TemplateError, match="row 7 of file 1") as caught:
        sft_samples([prompt(PLAIN, row=7)], chat_tokenizer(template), 0)
    assert len(str(caught.value)) <= 300


def test_a_failing_template_names_the_row() -> None:
    messages = [user("a"), answer(None, tool_calls=[calling({})["tool_calls"][0]] * 2)]
    with pytest.raises(TemplateError, match=r"row 3 of file 1.*single tool-calls"):
        sft_samples([prompt(messages, row=3)], chat_tokenizer(LLAMA31), 0)


def test_conversation_starting_with_untrained_answer_is_trained_after_it() -> None:
    messages = [answer("hello", step_loss_mask=0), *PLAIN]
    assert trained(chat_tokenizer(GLM4), messages) == ["\n2<|user|>", "\n4"]


def test_dropped_reasoning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stages"):
        sft_samples([prompt(THINKING)], chat_tokenizer(QWEN3), 0)
        assert not caplog.records
        sft_samples([prompt(THINKING, row=5)], chat_tokenizer(DEEPSEEK_R1), 0)
    assert "row 5" in caplog.text and "reasoning" in caplog.text
