"""Named chat templates, licence and model card travel with a model, and templates belong to its identity."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from penstock.stages.convert.targets import Origin, assets_hash, copy_assets, header_hash, model_fingerprint, stat_hash
from penstock.stages.convert.to_hf import export_to
from penstock.stages.convert.to_torch_dist import convert_hf, export_megatron
from penstock.storage.commit import Commit
from penstock.storage.store import Store

TRAVEL = {
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "additional_chat_templates/rag.jinja": "{{ documents }}",
    "LICENSE": "Apache",
    "LICENSE.md": "the same",
    "Notice": "parts by others",
    "USE_POLICY.md": "be kind",
    "README.md": "# A model",
}
STAY = {
    "additional_chat_templates/notes.md": "no template",
    ".gitattributes": "",
    "training_args.bin": "x",
    "readmeasure.bin": "x",
    "original/params.json": "{}",
}


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    directory = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    for name, text in (TRAVEL | STAY).items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    return directory


def files_below(directory: Path) -> dict[str, str]:
    names = TRAVEL | STAY
    return {name: (directory / name).read_text() for name in names if (directory / name).is_file()}


def test_named_templates_and_documents_are_copied(model: Path, tmp_path: Path) -> None:
    copy_assets(model, tmp_path / "copy")
    assert files_below(tmp_path / "copy") == TRAVEL
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template.keys() >= {"default", "tool_use", "rag"}


@pytest.mark.parametrize("export", ["hf", "megatron"])
def test_export_has_named_templates_and_documents(export: str, model: Path, tmp_path: Path) -> None:
    store, out = Store(str(tmp_path / "store")), tmp_path / "out"
    commit = Commit.model_validate_json(store.read(convert_hf(store, model).key) or b"")
    assert files_below(Path(store.path(commit.attempt)) / "hf_assets") == TRAVEL
    checkpoint = commit.model_copy(update={"kind": "checkpoint", "run": "r", "index": 20, "policy_version": 20})
    if export == "hf":
        export_to(store, checkpoint, Origin(model), str(out))
    else:
        export_megatron(store, checkpoint, Origin(model), str(out), "local")
        out = next(out.rglob("hf_assets"))
    assert files_below(out) == TRAVEL


@pytest.mark.parametrize(
    ("identify", "change"),
    [
        *((model_fingerprint, change) for change in ("edit", "add", "remove", "rename")),
        *((assets_hash, "rename"), (header_hash, "edit"), (stat_hash, "add")),
    ],
)
def test_changed_named_template_is_another_model(identify: Callable[[Path], str], change: str, model: Path) -> None:
    before, template = identify(model), model / "additional_chat_templates/tool_use.jinja"
    if change == "edit":
        template.write_text("{{ other }}")
    elif change == "add":
        template.with_name("more.jinja").write_text("{{ tools }}")
    elif change == "remove":
        template.unlink()
    else:
        template.rename(template.with_name("use_tool.jinja"))
    assert identify(model) != before


def test_edited_model_card_is_the_same_model(model: Path) -> None:
    before = model_fingerprint(model), assets_hash(model)
    (model / "README.md").write_text("# Another text")
    assert (model_fingerprint(model), assets_hash(model)) == before
