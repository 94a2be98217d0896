"""Rows with images become samples with expanded tokens and blobs; what cannot be used is refused with file and row."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import SPECIAL, chat_tokenizer
from image_files import BLUE, RED, encode, picture
from PIL import Image
from scripted_engine import KEYS, ScriptedClient, write_jsonl
from test_images import QWEN2, write_model

from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.data_rounds import sft_data_stage, sft_samples
from penstock.stages.rollout.prompts.data_source import Dataset, RolloutRound, new_groups, without_responses
from penstock.stages.rollout.prompts.prompt_check import check_prompt_data
from penstock.stages.rollout.prompts.prompt_images import PromptImages, directory_of_entry, read_image_file
from penstock.stages.rollout.prompts.prompt_rows import parse_canonical_row
from penstock.stages.rollout.prompts.source import LengthFilter, PromptSource
from penstock.stages.rollout.rollout import RolloutContext, rollout_stage
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.blobs import digest_of, read_blob
from penstock.storage.commit import Commit
from penstock.storage.errors import DataError, ModelError, OptionError
from penstock.storage.image_decoding import load_image
from penstock.storage.samples.sample import Status
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store

TEMPLATE = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{ message.content }}{%- else %}{%- for part in message.content %}
        {%- if part.type == 'image' %}{{ '<|image_pad|>' }}{%- else %}{{ part.text }}{%- endif %}
    {%- endfor %}{%- endif %}{{ '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
ONE, TWO = encode(Image.new("RGB", (56, 56), RED)), encode(Image.new("RGB", (112, 56), BLUE))  # 4 and 8 tokens
NAMES = [digest_of(ONE), digest_of(TWO)]
KEY = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}
ROUND = RolloutRound("run", 0, 0)
ANSWER = {"role": "assistant", "content": "red"}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def data_uri(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.fixture
def tokenizer(tmp_path: Path) -> PromptTokenizer:
    """A tokenizer with an image token, in the directory of a vision-language model."""
    made = chat_tokenizer(TEMPLATE)
    made.inner.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<|image_pad|>"]})
    token = made.inner.convert_tokens_to_ids("<|image_pad|>")
    made.directory = write_model(tmp_path / "model", QWEN2, image_token_id=token)
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with two pictures, and one beside it that rows must not read."""
    (tmp_path / "data/sub").mkdir(parents=True)
    (tmp_path / "data/one.png").write_bytes(ONE)
    (tmp_path / "data/sub/two.png").write_bytes(TWO)
    (tmp_path / "secret.png").write_bytes(ONE)
    return tmp_path / "data"


def config_of(data: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> RolloutConfig:
    """The options for a prompt file, or for `rows` in the directory `data`."""
    path = str(data) if rows is None else write_jsonl(data / "rows.jsonl", rows)
    return RolloutConfig(prompt_data=path, **{**KEY, "rm_type": "random", **options})


def rows_of(config: RolloutConfig) -> list[Any]:
    return [parse_canonical_row(row) for row in PromptSource.open(config).files[0]]


def samples_of(config: RolloutConfig, tokenizer: PromptTokenizer, store: Store, count: int = 1) -> list[Any]:
    """Return the first sample of each of the first prompts."""
    source = PromptSource.open(config)
    prompts, _ = source.take(source.restore(None), count)
    images = PromptImages(config, tokenizer.directory, store)
    return [group[0] for group in new_groups(prompts, tokenizer, ROUND, 2, images=images)]


# ---- rows ------------------------------------------------------------------------------------------------------------

FORMS = {  # how a row may give the two images, for `<image> and <image>`
    "paths": ["one.png", "sub/two.png"],
    "path with dots inside": ["sub/../one.png", "./sub/two.png"],
    "dictionaries": [{"bytes": None, "path": "one.png"}, {"path": "sub/two.png"}],
    "urls": [{"url": "one.png"}, {"url": data_uri(TWO)}],
    "data URIs": [data_uri(ONE), data_uri(TWO)],
}


@pytest.mark.parametrize("images", FORMS.values(), ids=FORMS)
def test_images_of_a_column_replace_placeholders(
    images: list[Any], place: Path, tokenizer: PromptTokenizer, store: Store
) -> None:
    [sample] = samples_of(config_of(place, [{"input": "<image> and <image>?", "images": images}]), tokenizer, store)
    pad = tokenizer.inner.convert_tokens_to_ids("<|image_pad|>")
    assert sample.prompt == "<|im_start|>user\n<|image_pad|> and <|image_pad|>?<|im_end|>\n<|im_start|>assistant\n"
    text = tokenizer.encode([sample.prompt])[0]
    first, second = (index for index, token in enumerate(text) if token == pad)
    assert sample.token_ids == [*text[:first], *[pad] * 4, *text[first + 1 : second], *[pad] * 8, *text[second + 1 :]]
    assert sample.images == NAMES and sample.status is Status.PENDING
    assert len(sample.loss_mask) == len(sample.rollout_logprobs) == len(sample.token_ids)
    assert [read_blob(store, name) for name in sample.images] == [ONE, TWO]


def test_bytes_of_parquet_give_the_same_rows_as_data_uris(place: Path) -> None:
    rows = [{"input": "<image>?", "images": [{"bytes": ONE, "path": "x.png"}]}, {"input": "text", "images": []}]
    pq.write_table(pa.Table.from_pylist(rows), place / "structs.parquet")
    pq.write_table(pa.table({"input": ["<image>?", "text"], "images": [ONE, None]}), place / "single.parquet")
    rows = [{"input": "<image>?", "images": [data_uri(ONE).replace("image/png", "")]}, {"input": "text"}]
    write_jsonl(place / "rows.jsonl", rows)
    expected = rows_of(config_of(place / "rows.jsonl"))
    assert rows_of(config_of(place / "structs.parquet")) == rows_of(config_of(place / "single.parquet")) == expected
    assert expected[1].images == () and expected[1].prompt == "text"


def test_images_in_place_and_from_the_column_keep_their_order(place: Path) -> None:
    own = {"type": "image", "image": "sub/two.png"}
    for image in ({"type": "image"}, words("<image>")):
        messages = [user([words("a"), image, own, words("b<image>")]), ANSWER, user("c <image>")]
        path = write_jsonl(place / "rows.jsonl", [{"input": messages, "images": ["1.png", "2.png", "3.png"]}])
        [row] = rows_of(config_of(path))
        assert row.images == ["1.png", "sub/two.png", "2.png", "3.png"]
        kinds = [[part["type"] for part in message["content"]] for message in row.prompt if message["role"] == "user"]
        assert kinds == [["text", "image", "image", "text", "image"], ["text", "image"]]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "one.png", "text": None},
        {"type": "image_url", "image_url": {"url": "one.png"}},
        {"type": "image", "image": {"bytes": None, "path": "one.png"}},
    ],
)
def test_parts_may_have_their_image_without_a_column(part: dict[str, Any], place: Path) -> None:
    [row] = rows_of(config_of(place, [{"input": [user([part, words("what?")])]}], multimodal_keys={}))
    assert (row.images, row.prompt) == (["one.png"], [user([{"type": "image"}, words("what?")])])


def test_rows_without_images_keep_their_canonical_form(place: Path) -> None:
    path = write_jsonl(place / "rows.jsonl", [{"input": "a <image>", "label": "x"}])
    plain = config_of(path, multimodal_keys={}, label_key="label")
    assert list(PromptSource.open(plain).files[0]) == [b'["a <image>","x",{}]']
    messages = [user("<image>"), {"role": "assistant", "content": "I wrote <image>"}]
    write_jsonl(place / "rows.jsonl", [{"input": messages, "images": ["one.png"]}])
    assert rows_of(config_of(path))[0].prompt[1]["content"] == "I wrote <image>", "an answer has no placeholders"


BAD_ROWS = {  # row -> what the message says
    "fewer images than placeholders": ({"input": "<image> <image>", "images": ["a.png"]}, "2 places .* 1 images"),
    "more images than placeholders": ({"input": "<image>", "images": ["a.png", "b.png"]}, "1 places .* 2 images"),
    "placeholder and null": ({"input": "<image>", "images": None}, "1 places .* 0 images"),
    "part and placeholder": (
        {"input": [user([{"type": "image"}, words("<image>")])], "images": ["a.png"]}, "2 places .* 1 images"
    ),
    "number": ({"input": "<image>", "images": [3]}, "the image 3 is neither a path"),
    "empty dictionary": ({"input": "<image>", "images": [{}]}, r"the image \{\} is neither"),
    "pixels": ({"input": "<image>", "images": [[[0, 1], [2, 3]]]}, "is neither a path"),
    "image of an answer": (
        {"input": [user("a"), {"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]},
        "message 2 .assistant. has an image, but a model generates only text",
    ),
    "video": ({"input": [user([{"type": "video", "video": "a.mp4"}])]}, "only text and images are supported"),
    "broken json text": ({"input": "<image>", "images": '["a.png"'}, "is text but not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ROWS)
def test_row_with_wrong_images_is_refused_with_file_and_line(name: str, place: Path) -> None:
    row, message = BAD_ROWS[name]
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: column '(input|images)'.*{message}") as caught:
        rows_of(config_of(place, [{"input": "fine"}, row]))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


# ---- files -----------------------------------------------------------------------------------------------------------

BAD_FILES = {  # image of the row -> what the message says
    "missing": ("none.png", "'none.png'|\"none.png\" does not exist"),
    "directory": ("sub", "cannot be read"),
    "parent": ("../secret.png", "is outside of .*/data, from where images may be read"),
    "absolute path outside": ("{root}/secret.png", "is outside of"),
    "link to a directory": ("linked/secret.png", "is outside of"),
    "sibling with the same beginning": ("{root}/data-2/one.png", "is outside of"),
    "device": ("/dev/zero", "is outside of"),
    "pipe": ("pipe", "is a pipe or a device"),
    "unknown protocol": ("nowhere://a.png", "cannot be read"),
    "chained URI": ("simplecache::file://{root}/data/one.png", "is a chained URI"),
    "NUL": ("one\0.png", "has a NUL"),
    "broken base64": ("data:image/png;base64,a$b", "is not base64"),
    "empty file": ("empty.png", "has no bytes"),
    "not an image": ("rows.jsonl", "is none of PNG"),
    "truncated": ("truncated.png", "cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_unusable_image_fails_the_samples_of_its_prompt_only(
    name: str, place: Path, tmp_path: Path, tokenizer: PromptTokenizer, store: Store
) -> None:
    source, message = BAD_FILES[name]
    (place / "linked").symlink_to(tmp_path)
    (tmp_path / "data-2").mkdir()
    (tmp_path / "data-2/one.png").write_bytes(ONE)
    (place / "empty.png").write_bytes(b"")
    (place / "truncated.png").write_bytes(encode(picture(size=(200, 200)).effect_spread(50))[:3000])
    os.mkfifo(place / "pipe")
    images = ["one.png", source.replace("{root}", str(tmp_path))]
    path = write_jsonl(place / "rows.jsonl", [{"input": "<image>", "images": ["one.png"]},
                                             {"input": "<image><image>", "images": images}])  # fmt: skip
    config = config_of(path)
    good, bad = samples_of(config, tokenizer, store, 2)
    assert good.status is Status.PENDING and good.images == NAMES[:1]
    error = bad.metadata["error"]
    assert bad.status is Status.FAILED and bad.images == [] and not any(bad.loss_mask)
    assert error.startswith(f"{path} row 1: image 2 ") and "\n" not in error and len(error) < 400
    with pytest.raises(DataError, match=rf"rows\.jsonl row 1: image 2 .*({message})"):
        check_prompt_data(config, tokenizer=tokenizer)
    assert store.list("blobs") == NAMES[:1], "nothing of the bad row is stored"
    [again] = without_responses([bad])
    assert again.status is Status.FAILED, "a group in the buffer does not lose the reason"


def test_image_roots_allow_other_directories_and_protocols(place: Path, tmp_path: Path) -> None:
    import fsspec

    memory = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/a/one.png", ONE)
    roots = [str(tmp_path), f"{memory}/a"]
    assert read_image_file("data/one.png", roots) == read_image_file(f"{tmp_path}/secret.png", roots) == ONE
    assert read_image_file(f"{memory}/a/one.png", roots) == ONE
    assert read_image_file("one.png", roots[::-1]) == ONE
    assert read_image_file("one.png", [f"file://{place}/"]) == ONE
    for source in (f"{memory}/b/one.png", f"{memory}/a/../b/one.png", "/etc/passwd"):
        with pytest.raises(DataError, match=r"is outside of|has `\.\.`"):
            read_image_file(source, roots)
    with pytest.raises(DataError, match="give --image-roots"):
        read_image_file("one.png", [])


@pytest.mark.parametrize(
    ("entry", "directory"),
    [
        ("rows.jsonl", "."), ("/rows.jsonl", "/"), ("/a/b/rows.parquet@[0:9]", "/a/b"), ("a/*/x.jsonl", "a"),
        ("a/x-*.jsonl", "a"), ("s3://bucket/x.jsonl.gz", "s3://bucket"), ("/a/saved", "/a/saved"),
    ],
)  # fmt: skip
def test_images_are_beside_their_prompt_file(entry: str, directory: str) -> None:
    assert directory_of_entry(entry) == directory


# ---- models and templates --------------------------------------------------------------------------------------------


def test_images_for_a_text_model_are_refused(place: Path, tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    path = write_jsonl(place / "rows.jsonl", [{"input": "<image>", "images": ["one.png"]}])
    tokenizer.directory = write_model(tmp_path / "text", None)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json, which prompts with images need"):
        check_prompt_data(config_of(path), tokenizer=tokenizer)
    without = config_of(path, apply_chat_template=False)
    with pytest.raises(DataError, match="need a chat template"):
        check_prompt_data(without, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (TEMPLATE.replace("{{ '<|image_pad|>' }}", ""), "0 image tokens for 1 images"),
        (TEMPLATE.replace("'<|image_pad|>'", "'<|image_pad|>' * 2"), "2 image tokens for 1 images"),
        (TEMPLATE.replace("{{ part.text }}", ""), "does not write the content of message 1"),
    ],
)
def test_template_that_does_not_write_images_is_refused(
    template: str, message: str, place: Path, tokenizer: PromptTokenizer
) -> None:
    tokenizer.inner.chat_template = template
    with pytest.raises(DataError, match=rf"rows\.jsonl row 0: .*{message}"):
        check_prompt_data(config_of(place, [{"input": "see <image>", "images": ["one.png"]}]), tokenizer=tokenizer)


def test_image_token_in_the_text_of_a_row_is_refused(place: Path, tokenizer: PromptTokenizer, store: Store) -> None:
    rows = [{"input": "<image><|image_pad|>", "images": ["one.png"]}, {"input": "a <|image_pad|>"}]
    config = config_of(place, rows)
    for sample, numbers in zip(
        samples_of(config, tokenizer, store, 2), ("2 image tokens for 1", "1 image tokens for 0")
    ):
        assert sample.status is Status.FAILED and numbers in sample.metadata["error"]
        assert sample.images == [] and tokenizer.inner.convert_tokens_to_ids("<|image_pad|>") not in sample.token_ids
    with pytest.raises(DataError, match=r"rows\.jsonl row 0: the rendered text has 2 image tokens for 1 images"):
        check_prompt_data(config, tokenizer=tokenizer)


def test_images_are_refused_where_no_one_reads_them(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(DataError, match=r"message 1 .user.*only text is supported"):
        tokenizer.render([[user([{"type": "image", "image": "one.png"}])]])


# ---- lengths, SFT, rounds --------------------------------------------------------------------------------------------


def test_hint_for_a_prompt_with_an_image_is_refused(place: Path, tokenizer: PromptTokenizer) -> None:
    rows = [{"input": "a", "demo": "b"}, {"input": "<image>", "images": ["one.png"], "demo": "b"}]
    config = config_of(place, rows, opd_hint_key="demo")
    with pytest.raises(DataError, match=r"rows.jsonl row 1: .*--opd-self"):
        check_prompt_data(config, tokenizer=tokenizer, hint_template="{prompt}{hint}")


def test_length_limits_count_image_tokens(place: Path, tokenizer: PromptTokenizer, store: Store) -> None:
    rows = [{"input": "<image>", "images": [name]} for name in ("one.png", "sub/two.png", "none.png")]
    path = write_jsonl(place / "rows.jsonl", rows)
    [one, two, _] = samples_of(config_of(path), tokenizer, store, 3)
    assert len(two.token_ids) == len(one.token_ids) + 4
    config = config_of(path, rollout_max_prompt_len=len(one.token_ids))
    images = PromptImages(config, tokenizer.directory, store)
    source = PromptSource.open(config)
    dataset = Dataset(
        config, source, tokenizer, ROUND, LengthFilter(config, tokenizer, images.count_extra_tokens), images
    )
    first, second = (group[0] for group in dataset.sample(2))
    assert (first.images, second.status) == (NAMES[:1], Status.FAILED) and dataset.state.skipped == 1
    with pytest.raises(OptionError, match=r"rows\.jsonl row 0 .*maximum sequence length of 40"):
        write_jsonl(place / "rows.jsonl", rows[:2])
        options = {"rollout_max_response_len": 40 - len(one.token_ids) + 1}
        check_prompt_data(config_of(path, **options), tokenizer=tokenizer, max_seq_len=40)


def test_prompts_that_a_data_source_issues_may_have_images(
    place: Path, tokenizer: PromptTokenizer, store: Store
) -> None:
    for roots, status in (([], Status.FAILED), ([str(place)], Status.PENDING)):
        config = config_of(place, [{"input": "a"}], image_roots=roots)
        images = PromptImages(config, tokenizer.directory, store)
        dataset = Dataset(config, PromptSource.open(config), tokenizer, ROUND, None, images)
        parts = [{"type": "image", "image": ONE}, {"type": "image", "image": "sub/two.png"}, words("a")]
        [sample, *_] = dataset.issue([user(parts)])
        assert sample.status is status
    assert sample.images == NAMES


def test_images_in_sft_conversations_are_not_trained(place: Path, tokenizer: PromptTokenizer, store: Store) -> None:
    chat = [user("<image> colour?"), ANSWER, user([words("and "), {"type": "image", "image": "sub/two.png"}]),
            {"role": "assistant", "content": "blue"}]  # fmt: skip
    broken = [user("<image>"), ANSWER]
    rows = [{"input": chat, "images": ["one.png"]}, {"input": broken, "images": ["none.png"]}]
    config = config_of(place, rows, rollout_batch_size=2)
    source = PromptSource.open(config)
    prompts, _ = source.take(source.restore(None), 2)
    images = PromptImages(config, tokenizer.directory, store)
    sample, failed = sft_samples(prompts, tokenizer, 0, None, images)
    trained = [token for token, is_trained in zip(sample.token_ids, sample.loss_mask) if is_trained]
    assert tokenizer.decode([trained], skip_special_tokens=False) == ["red<|im_end|>blue<|im_end|>"]
    assert sample.images == NAMES and sample.token_ids.count(images.image_token_id) == 12
    assert failed.status is Status.FAILED and "row 1 of file 1 of --prompt-data: image 1 " in failed.metadata["error"]
    assert not any(failed.loss_mask)
    with pytest.raises(DataError, match="has only 40 positions"):
        sft_samples(prompts[:1], tokenizer, 0, 40, images)
    context = RolloutContext(store, config, source, tokenizer)
    commit = sft_data_stage(context, KEYS.rollout_prefix(0), "run", 0, None)
    assert commit.blobs == {NAMES[0]: len(ONE), NAMES[1]: len(TWO)}
    with pytest.raises(DataError, match=r"rows\.jsonl row 1: image 1 .* does not exist"):
        check_prompt_data(config, is_sft=True, tokenizer=tokenizer)


def test_round_commits_its_images_and_their_processor(place: Path, tokenizer: PromptTokenizer, store: Store) -> None:
    rows = [{"input": "<image>?", "images": ["one.png"], "label": "1"}, {"input": "<image>", "images": ["none.png"]},
            {"input": "text"}, {"input": "<image>", "images": ["sub/two.png"]}]  # fmt: skip
    path = write_jsonl(place / "rows.jsonl", rows)
    config = config_of(path, rollout_batch_size=4, n_samples_per_prompt=2, image_max_pixels=6272)
    requests: list[list[int]] = []

    class Client(ScriptedClient):
        async def generate_each(self, prompts: Any, params: Any, **options: Any) -> Any:
            requests.extend(list(prompt) for prompt in prompts)
            return await super().generate_each(prompts, params, **options)

    def round_of(config: RolloutConfig, prefix: str) -> Commit:
        context = RolloutContext(
            store, config, PromptSource.open(config), tokenizer, ["http://engine"],
            connect=lambda urls, timeout: Client(urls, timeout, weight_version="run/0"),
        )  # fmt: skip
        return rollout_stage(context, prefix, ROUND)

    text_only = config_of(write_jsonl(place / "text.jsonl", [{"input": "a"}]), rollout_batch_size=1)
    without = round_of(text_only, "runs/text/rollouts/000000")
    assert without.blobs == {} and "image_processor" not in without.state and store.list("blobs") == []
    requests.clear()
    commit = round_of(config, KEYS.rollout_prefix(0))
    samples = read_samples(store, commit)
    assert [sample.images for sample in samples[::2]] == [NAMES[:1], [], [], NAMES[1:]]
    assert [sample.status is Status.FAILED for sample in samples[::2]] == [False, True, False, False]
    pad = PromptImages(config, tokenizer.directory).image_token_id
    assert sorted(request.count(pad) for request in requests) == [0, 0, 4, 4, 8, 8], "the engine gets expanded prompts"
    assert commit.blobs == {NAMES[0]: len(ONE), NAMES[1]: len(TWO)}
    processor = commit.state["image_processor"]
    assert (processor["max_pixels"], processor["pillow"]) == (6272, Image.__version__)
    assert [load_image(read_blob(store, name)).shape for name in NAMES] == [(56, 56, 3), (56, 112, 3)]
    assert json.loads(store.read(f"{KEYS.rollout_prefix(0)}.commit.json"))["record_version"] == 3


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))
