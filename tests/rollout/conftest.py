"""Fixture: the tiny tokenizer."""

import pytest

from penstock.stages.rollout.text.tokenizer import PromptTokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    from penstock.flows.commands.demo_model import make_tokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(directory)
    return PromptTokenizer(directory, apply_chat_template=True)
