"""Messages of conversations in OpenAI's format, brought into one form for chat templates; tags of thoughts."""

from __future__ import annotations

import re

# Qwen, DeepSeek, GLM, Kimi; Seed-OSS; Kimi-VL; Magistral
THOUGHT_TAGS = re.compile(r"</?(?:seed:)?think(?:ing)?>|◁/?think▷|\[/?THINK\]")


def thought_end_tag(tag: str) -> str:
    """Return the tag that ends a thought which `tag` has begun."""
    return f"{tag[0]}/{tag[1:]}"
