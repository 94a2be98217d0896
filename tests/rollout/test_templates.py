"""Chat templates are untrusted programs: rendered as transformers renders them, in a process with limits that ends
in one sentence."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from chat_templates import chat_tokenizer
from sft_templates import DEEPSEEK_V3, FAMILIES

from penstock.stages.rollout.agents.conversation import ChatFormat
from penstock.stages.rollout.text.templates import RenderLimitError, RenderLimits, TemplateRenderer
from penstock.stages.rollout.text.tokenizer import PromptTokenizer, check_tokenizer
from penstock.storage.errors import TemplateError

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "1+1?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "<b>ü</b>"}}]
LOOP = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    """One with low limits."""
    renderer = TemplateRenderer(RenderLimits(cpu_seconds=0.3, memory_bytes=1 << 28, max_chars=1 << 20))
    yield renderer
    renderer.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_that_of_transformers(family: str) -> None:
    tokenizer = chat_tokenizer(FAMILIES[family])
    messages = [*CHAT, {"role": "assistant", "content": "é😀"}, {"role": "user", "content": "\n"}]
    for prompt, options in ((True, {}), (False, {}), (True, {"enable_thinking": False, "thinking": True})):
        tokenizer.template_options = options
        [text] = tokenizer.render_chats([messages], add_generation_prompt=prompt, tools=[TOOLS])
        assert text == tokenizer.inner.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompt, **options
        )


def test_template_gets_special_tokens_and_tools_variant() -> None:
    tokenizer = chat_tokenizer(None)
    tokenizer.inner.chat_template = {
        "default": "{{ unk_token }}",
        "tool_use": "{{ tools | tojson }}{{ strftime_now('%Y')[:1] }}",
    }
    assert tokenizer.render_chats([CHAT, CHAT], add_generation_prompt=True, tools=[None, TOOLS]) == [
        "<unk>",
        json.dumps(TOOLS, ensure_ascii=False) + "2",
    ]


@pytest.mark.parametrize(
    ("template", "limited"),
    [
        (LOOP, True),
        ("{{ 'x' * 10**10 }}", True),
        ("{{ 'x' * 2000000 }}", True),
        ("{% for i in range(10**9) %}{% endfor %}", False),  # the sandbox's own limit
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", False),
        ("{{ messages.append(1) }}", False),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", False),
        ("{% if %}", False),
    ],
)
def test_a_template_that_fails_or_exceeds_its_limits_is_one_error(
    renderer: TemplateRenderer, template: str, limited: bool
) -> None:
    [error] = renderer.render(template, [(CHAT, None, True)])
    assert isinstance(error, TemplateError) and isinstance(error, RenderLimitError) == limited
    assert "\n" not in str(error) and len(str(error)) < 300
    assert renderer.render("{{ messages[0].content }}", [(CHAT, None, True)] * 200) == ["1+1?"] * 200


def test_other_conversations_of_a_batch_are_rendered_although_one_exceeds_its_limits(
    renderer: TemplateRenderer,
) -> None:
    template = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
    loop = [{"role": "user", "content": "loop"}]
    results = renderer.render(template, [(CHAT, None, True), (loop, None, True), (CHAT, None, True)])
    assert results[::2] == ["1+1?", "1+1?"] and isinstance(results[1], RenderLimitError)


def test_a_killed_process_is_replaced() -> None:
    renderer = TemplateRenderer()
    before = set(psutil.Process().children())
    try:
        assert renderer.render("a", [(CHAT, None, True)]) == ["a"]
        [process] = set(psutil.Process().children()) - before
        process.kill()
        renderer.render("b", [(CHAT, None, True)])  # an error, if it reaches the killed process
        assert renderer.render("c", [(CHAT, None, True)]) == ["c"]
        assert not process.is_running()
    finally:
        renderer.close()


def test_threads_get_their_own_texts() -> None:
    tokenizer = chat_tokenizer("{{ messages[0].content }}")
    wrong: list[str] = []

    def render(name: str) -> None:
        for i in range(50):
            [text] = tokenizer.render_chats([[{"role": "user", "content": f"{name}{i}"}]], add_generation_prompt=True)
            if text != f"{name}{i}":
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_conversations_of_agents_raise_template_error() -> None:
    with pytest.raises(TemplateError, match="1\\+1"):
        ChatFormat(chat_tokenizer("{{ 1 // 0 }}")).render(CHAT)
    with pytest.raises(RenderLimitError):
        ChatFormat(chat_tokenizer("{{ 'x' * 10**10 }}")).render(CHAT)


def test_preflight_renders_template(tmp_path: Any) -> None:
    for template in ("{{ 1 // 0 }}", "{{ 'x' * 10**10 }}", "{% if %}"):
        chat_tokenizer(template).inner.save_pretrained(tmp_path)
        with pytest.raises(TemplateError, match=str(tmp_path)):
            check_tokenizer(tmp_path, apply_chat_template=True)
    chat_tokenizer(DEEPSEEK_V3).inner.save_pretrained(tmp_path)
    assert check_tokenizer(tmp_path, apply_chat_template=True).render(["a"]) == [
        "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>"
    ]


@pytest.mark.full
def test_gguf_module_of_transformers_imports_torch_when_it_uses_it(tokenizer: PromptTokenizer, tmp_path: Any) -> None:
    tokenizer.inner.save_pretrained(tmp_path)
    code = (
        "import sys\n"
        "from penstock.stages.rollout.text.tokenizer import PromptTokenizer\n"
        f"PromptTokenizer({str(tmp_path)!r}, apply_chat_template=False)\n"
        "assert 'torch' not in sys.modules\n"
        "from transformers import modeling_gguf_pytorch_utils as gguf\n"
        "assert gguf.torch.zeros(2).shape == (2,)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
