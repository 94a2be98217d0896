"""SFT: for the templates of all families exactly the model's text is trained, the rendered text is unchanged, and a row
that a template does not write is named."""

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from chat_templates import chat_tokenizer, with_template
from scripted_engine import write_jsonl
from sft_templates import (
    DEEPSEEK_R1,
    FAMILIES,
    GLM4,
    GLM4_0414,
    GLM45_WITH_NONE,
    GLM47,
    LLAMA31,
    ODD_DEEPSEEK_R1,
    ODD_DEEPSEEK_V3,
    QWEN3,
    QWEN3_THINKING_2507,
    QWEN25,
)

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.data_rounds import sft_data_stage, sft_samples
from penstock.stages.rollout.prompts.source import Prompt, PromptSource
from penstock.stages.rollout.rollout import RolloutContext, read_resume_point
from penstock.stages.rollout.text.loss_masks import MARK, split_trained_text
from penstock.stages.rollout.text.templates import Messages
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.commit import RunKeys
from penstock.storage.errors import DataError, TemplateError
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

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
    [text] = tokenizer.try_render([(messages, tools, False)], {"a": MARK, "z": MARK})
    assert isinstance(text, str)
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
def test_every_answer_is_trained_exactly(family: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    for messages in (PLAIN, THINKING, for_family(family, AGENT)):
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


@pytest.mark.parametrize("count", [2, pytest.param(60, marks=pytest.mark.full)])
@every_family
def test_random_conversations_are_trained_exactly(family: str, count: int) -> None:
    tokenizer, generator = chat_tokenizer(FAMILIES[family]), random.Random(f"masks of {family}")
    for _ in range(count):
        messages = random_conversation(generator, family)
        assert trained(tokenizer, messages, TOOLS) == marked(tokenizer, messages, TOOLS), messages


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


@pytest.mark.parametrize("family", ["qwen3", "glm-4", "deepseek-r1"])
def test_step_loss_mask_leaves_a_turn_untrained(family: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    expected = trained(tokenizer, PLAIN)
    assert trained(tokenizer, [PLAIN[0], {**PLAIN[1], "step_loss_mask": 0}, *PLAIN[2:]]) == expected[1:]
    assert trained(tokenizer, [*PLAIN[:3], {**PLAIN[3], "step_loss_mask": 0}]) == expected[:1]
    assert trained(tokenizer, [{**message, "step_loss_mask": 1} for message in PLAIN]) == expected
    with pytest.raises(DataError, match=r"row 0 of file 1.* no token of the conversation would be trained on"):
        sft_samples([prompt([{**message, "step_loss_mask": 0} for message in PLAIN])], tokenizer, 0)


def prompt(content: str | Messages, row: int = 0) -> Prompt:
    return Prompt(issue=0, epoch=0, file=0, row=row, content=content, label="", metadata={})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text", "no assistant message"),
        ([user("a")], "no assistant message"),
        ([user("a"), answer("b", step_loss_mask=0.5)], "step_loss_mask"),
    ],
)
def test_row_that_cannot_be_trained_raises_data_error(content: str | Messages, message: str) -> None:
    with pytest.raises(DataError, match=f"row 0 of file 1.*{message}"):
        sft_samples([prompt(content)], chat_tokenizer(QWEN3), rollout_id=0)


def test_fields_that_parquet_adds_do_not_reach_the_template() -> None:
    """Llama's template asks whether a message has `tool_calls`; in rows of Parquet every message has."""
    messages = [{**message, "tool_calls": None, "step_loss_mask": None} for message in PLAIN]
    assert trained(chat_tokenizer(LLAMA31), messages) == ["2<|eot_id|>", "4<|eot_id|>"]


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
        "{% for message in messages %}{{ 'x' if message.content == '2' else message.content }}{% endfor %}",
    ],
)
def test_template_whose_answers_cannot_be_located_raises_with_row(template: str) -> None:
    with pytest.raises(TemplateError, match="row 7 of file 1") as caught:
        sft_samples([prompt(PLAIN, row=7)], chat_tokenizer(template), 0)
    assert len(str(caught.value)) <= 300


def test_conversation_starting_with_untrained_answer_is_trained_after_it() -> None:
    messages = [answer("hello", step_loss_mask=0), *PLAIN]
    assert trained(chat_tokenizer(GLM4), messages) == ["\n2<|user|>", "\n4"]


def test_dropped_reasoning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="stages"):
        sft_samples([prompt(THINKING)], chat_tokenizer(QWEN3), 0)
        assert not caplog.records
        sft_samples([prompt(THINKING, row=5)], chat_tokenizer(DEEPSEEK_R1), 0)
    assert "row 5" in caplog.text and "reasoning" in caplog.text


NEXT = [user("2+2?"), answer("4")]
WITHOUT_ANSWER: dict[str, Messages] = {
    "empty last": [user("1+1?"), answer("")],
    "empty first": [user("1+1?"), answer(""), *NEXT],
    "blank": [user("1+1?"), answer(" \n"), *NEXT],
}
ASSISTANT_FIRST: dict[str, Messages] = {
    "greeting": [answer("hello"), *NEXT],
    "greeting after system": [SYSTEM, answer("hello"), *NEXT],
    "thoughts apart": [answer("hello", reasoning_content="hm"), *NEXT],
    "call": [calling({"a": "1"}), result("r"), answer("2"), *NEXT],
}
ROUNDS: dict[str, Messages] = {
    "one round": [user("q?"), calling({"a": "1"}), result("r"), answer("2")],
    "two rounds": [user("q?"), calling({"a": "1"}), result("r"), calling({"a": "2"}, 1), result("s", 1), answer("2")],
    "ends with call": [user("q?"), calling({"a": "1"}), result("r"), calling({"a": "2"}, 1)],
    "without arguments": [user("q?"), calling({}), result("r"), calling({}, 1), result("s", 1), answer("2")],
    "empty answer": [user("q?"), calling({"a": "1"}), result("r"), answer("")],
    "two questions": [user("q?"), calling({"a": "1"}), result("r"), answer("2"), user("p?"), calling({}), result("s")],
    "null content": [user("q?"), {**calling({"a": "1"}), "content": None}, result("r"), answer("2")],
    "no content": [
        *(user("q?"), {"role": "assistant", "tool_calls": calling({"a": "1"})["tool_calls"]}),
        *(result("r"), answer("2")),
    ],
    "arguments as text": [user("q?"), calling('{"a": "1"}'), result("r"), answer("2")],
}


def check_trained(family: str, messages: Messages, unwritten: str = "") -> None:
    """Check that what the template marks is trained, or that the message which it does not write is named."""
    tokenizer = chat_tokenizer(FAMILIES[family])
    if unwritten:
        with pytest.raises(TemplateError, match=f"row 7 of file 1.*does not write {unwritten}"):
            sft_samples([prompt(messages, row=7)], tokenizer, 0)
    else:
        expected = [text for text in marked(tokenizer, messages, TOOLS) if text]
        assert trained(tokenizer, messages, TOOLS) == expected, messages


@every_family
def test_empty_answer_trains_its_end(family: str) -> None:
    for name, messages in WITHOUT_ANSWER.items():
        check_trained(family, messages, "message 2" if family == "glm-4" and name != "blank" else "")


@every_family
def test_conversation_that_begins_with_assistant_is_trained(family: str) -> None:
    for name, messages in ASSISTANT_FIRST.items():
        if family != "moonlight" or name != "call":
            check_trained(family, messages)


@every_family
def test_rounds_of_calls_are_trained(family: str) -> None:
    for name, messages in ROUNDS.items():
        unwritten = {"moonlight": "a tool call of message 2 "}
        if name == "empty answer":
            unwritten["glm-4"] = "message 4 "
        check_trained(family, messages, unwritten.get(family, ""))


@pytest.mark.parametrize("template", [ODD_DEEPSEEK_V3, ODD_DEEPSEEK_R1, GLM45_WITH_NONE], ids=["v3", "r1", "glm-4.5"])
def test_rounds_of_calls_are_trained_with_templates_that_want_one_form(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    for messages in (messages for name, messages in ROUNDS.items() if name != "two questions"):
        pieces = trained(tokenizer, messages, TOOLS)
        assert pieces == marked(tokenizer, messages, TOOLS) and "None" not in "".join(pieces)
        assert sum("add\n" in piece for piece in pieces) == sum("tool_calls" in message for message in messages)


def test_rounds_of_calls_by_hand() -> None:
    call = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": "%s"}\n```<｜tool▁call▁end｜>'
    end = "<｜end▁of▁sentence｜>"
    for template in (ODD_DEEPSEEK_V3, ODD_DEEPSEEK_R1):
        assert trained(chat_tokenizer(template), ROUNDS["two rounds"], TOOLS) == [
            "<｜tool▁calls▁begin｜>" + call % 1,
            "\n" + call % 2 + "<｜tool▁calls▁end｜>" + end,
            "2" + end,
        ]
    assert trained(chat_tokenizer(GLM45_WITH_NONE), ROUNDS["null content"], TOOLS)[0] == (
        "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
    )


CHAT_ML = """{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}CALLS
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TALKING = [user("q?"), {**calling({"a": "1"}), "content": "let me see"}, result("r"), answer("2")]
TWO_CALLS = [user("q?"), answer("", tool_calls=[calling({"a": i})["tool_calls"][0] for i in (1, 2)]), result("r")]


@pytest.mark.parametrize(
    ("template", "messages", "missing"),
    [
        (GLM4_0414, ROUNDS["null content"], "a tool call of message 2 "),
        (GLM4_0414, [user("q?"), answer("let me"), result("r"), answer("2")], "the content of message 3 "),
        (CHAT_ML.replace("CALLS", ""), ROUNDS["without arguments"], "a tool call of message 2 "),
        (ODD_DEEPSEEK_V3, TALKING, "a tool call of message 2 "),
        (LLAMA31, TALKING, "the content of message 2 "),
        (
            CHAT_ML.replace("CALLS", "{{- message.tool_calls[0].function.arguments if message.tool_calls }}"),
            TWO_CALLS,
            "a tool call of message 2 ",
        ),
        (
            CHAT_ML.replace("CALLS", "{%- for call in message.tool_calls %}{{- call.function.name }}{%- endfor %}"),
            ROUNDS["one round"],
            "a tool call of message 2 ",
        ),
        (QWEN25.replace("message.role == 'tool'", "false"), ROUNDS["one round"], "the content of message 3 "),
        (CHAT_ML.replace("in messages", "in messages if message.role != 'system'"), [SYSTEM, *NEXT], "message 1 "),
        (BLOCKS, ROUNDS["null content"], "a tool call of message 2 "),
        (BLOCKS.replace("in messages", "in messages if message.role != 'user'"), NEXT, "the content of message 1 "),
    ],
)
def test_text_that_template_does_not_write_is_error_with_row(template: str, messages: Any, missing: str) -> None:
    with pytest.raises(TemplateError, match=f"row 7 of file 1.*does not write .*{missing}") as caught:
        sft_samples([prompt(messages, row=7)], chat_tokenizer(template.replace("CALLS", "")), 0)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("arguments", [{"a": 1, "b": "ü"}, '{"a":1,"b":"\\u00fc"}'])
def test_calls_are_not_written_as_text_in_text(arguments: Any) -> None:
    """Qwen 2.5's template writes the arguments with `tojson`, which would quote a text."""
    template = QWEN25.replace("call.function.arguments if call.function.arguments is string else ", "")
    tokenizer = chat_tokenizer(template)
    chat = [user("q?"), calling(arguments), result("r")]
    [text] = tokenizer.render_chats([chat], add_generation_prompt=True, tools=[TOOLS])
    assert '{"name": "add", "arguments": {"a": 1, "b": "ü"}}' in text
    assert trained(tokenizer, chat, TOOLS) == marked(tokenizer, chat, TOOLS)


def chat(*turns: str) -> Messages:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": turn} for i, turn in enumerate(turns)]


def trained_text(tokenizer: PromptTokenizer, messages: Messages) -> list[str]:
    """The masked tokens, decoded one by one."""
    [sample] = sft_samples([prompt(messages)], tokenizer, rollout_id=0)
    sample.check()
    kept = [token for token, mask in zip(sample.token_ids, sample.loss_mask) if mask]
    return tokenizer.decode([[token] for token in kept], skip_special_tokens=False)


def test_every_assistant_turn_is_trained_and_the_text_is_whole(tokenizer: PromptTokenizer) -> None:
    messages = chat("1+1=", "2", "and 2+2=", "4")
    assert trained_text(tokenizer, messages) == ["2", "<|end|>", "4", "<|end|>"]
    [sample] = sft_samples([prompt(messages)], tokenizer, rollout_id=0)
    [whole] = tokenizer.render_chats([messages], add_generation_prompt=False)
    assert sample.token_ids == tokenizer.encode([whole])[0]
    assert sample.prompt + sample.response == whole


def test_a_template_that_opens_every_conversation_differently_is_trained_exactly(tokenizer: PromptTokenizer) -> None:
    other = with_template(tokenizer, "{{ messages | length }}" + tokenizer.inner.chat_template)
    assert trained_text(other, chat("1+1=", "2", "and 2+2=", "4")) == ["2", "<|end|>", "4", "<|end|>"]


def test_stage_commits_rows_in_order(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    rows = [{"messages": chat(f"{i}+0=", f"{i}")} for i in range(10)]
    config = RolloutConfig(
        prompt_data=write_jsonl(tmp_path / "rows.jsonl", rows),
        input_key="messages",
        rollout_batch_size=6,
        rollout_shuffle=False,
    )
    store, keys, source = Store(str(tmp_path / "store")), RunKeys("sft"), PromptSource.open(config)
    seen = []
    for r in range(3):
        commit = sft_data_stage(
            RolloutContext(store, config, source, tokenizer),
            keys.rollout_prefix(r),
            "sft",
            r,
            read_resume_point(store, keys, r).state,
        )
        assert commit.policy_version == -1 and commit.summary["rollout/num_samples"] == 6
        seen += read_samples(store, commit)
    assert [sample.response for sample in seen] == [f"{i % 10}<|end|>" for i in range(18)]
    assert len({sample.sample_id for sample in seen}) == 18
    assert all(sample.policy_versions == (-1, -1) and not any(sample.rollout_logprobs) for sample in seen)
