"""The GPU plan of a run: plans of all recipes for many GPUs, `penstock doctor --plan`, and refusals of preflight."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.families import read_shape, shape_from_config
from penstock.engines.families.shape import ModelShape
from penstock.flows import gpu_plan as plans
from penstock.flows.cli import main
from penstock.flows.config import Flow, PostTrainConfig, derive, validate_config
from penstock.flows.inspect.plan import distribute_gpus
from penstock.flows.options.flags import parse_config, parse_values
from penstock.flows.runtime import preflight
from penstock.flows.runtime.resolve import resolve
from penstock.storage.errors import EngineError, LayoutError, OptionError
from penstock.storage.store import Store
from tests.engines.test_vision_shapes import qwen2_5

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
GIB = 1 << 30
STORE = Store("memory://", probe=False)


def recipe_words(name: str) -> list[str]:
    """Return the words for a recipe: demo-ppo is used on top of demo-grpo."""
    return ["--config", *(["demo-grpo"] if name == "demo-ppo" else []), name]


def planned(words: list[str], num_gpus: int) -> PostTrainConfig:
    values = parse_values(words)
    distribute_gpus(values, {"--num-gpus": str(num_gpus)})
    return validate_config(values)


def checked_plan(config: PostTrainConfig, shape: ModelShape, flow: Flow = Flow.TRAIN) -> plans.GpuPlan:
    plans.check_layout(shape, config.train)
    plans.check_gpu_sizes(flow, config, shape)
    plan = plans.plan_gpu_memory(flow, config, shape, 80 * GIB)
    plans.check_memory(plan)
    return plan


@pytest.mark.parametrize("recipe", ["demo-grpo", "demo-ppo", "demo-sft", "1gpu"])
def test_recipe_has_a_consistent_plan_for_8_64_and_512_gpus(
    recipe: str, tiny_model: Path, model_dir: Callable[[str], str]
) -> None:
    words = recipe_words(recipe)
    flow = Flow.SFT if recipe == "demo-sft" else Flow.TRAIN
    shape = read_shape(model_dir("qwen3-0.6B") if recipe == "1gpu" else tiny_model)
    batch = derive(parse_config(words)).train.global_batch_size or 0
    prompts = parse_config(words).rollout.rollout_batch_size * 8
    larger = ["--rollout-batch-size", str(prompts), "--global-batch-size", str(8 * batch)]
    peaks = []
    for num_gpus in (8, 64, 512):
        if batch < num_gpus:  # the plan is refused until the batch is enlarged
            with pytest.raises(OptionError, match=r"--global-batch-size .* is smaller than the"):
                planned(words, num_gpus)
        config = planned([*words, *larger], num_gpus)
        assert config.train.num_ranks == config.train.data_parallel_size == num_gpus
        plan = checked_plan(config, shape, flow)
        assert plan.peak_bytes < plan.gpu_bytes
        peaks.append(plan.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


OPTIONS = {  # letters of docs/start.md -> options
    "C": "--colocate --sglang-mem-fraction-static 0.7",
    "M": "--max-tokens-per-gpu 8192",
    "R": FULL,
    "O": "--optimizer-cpu-offload",
}
MODELS = {
    "up to 0.6B": "qwen3-0.6B",
    "1.5B to 1.7B": "qwen3-1.7B",
    "3B": "llama3.2-3B-Instruct",
    "4B": "qwen3-4B",
    "7B to 8B": "qwen3-8B",
}
PAGE = (Path(__file__).parents[2] / "docs/start.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("parameters", MODELS)
def test_options_of_the_page_on_one_gpu_fit_with_7_percent_left(
    parameters: str, model_dir: Callable[[str], str]
) -> None:
    assert all(f"`{options}`" in PAGE for options in OPTIONS.values())
    sizes = [size * GIB for size in (24, 40, 48, 80, 141)]
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| {parameters} |")]
    shape = read_shape(model_dir(MODELS[parameters]))
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    assert len(cells) == len(sizes)
    for size, cell in zip(sizes, cells):
        letters = "" if cell == "nothing" else "C R O" if cell == "-" else cell
        options = " ".join(OPTIONS[letter] for letter in letters.split())
        config = parse_config([*recipe_words("1gpu"), *options.split()])
        plan = plans.plan_gpu_memory(Flow.TRAIN, config, shape, size)
        assert (plan.peak_bytes <= 0.93 * size) == (cell != "-"), (size // GIB, cell)


LARGE = [
    ("qwen3-8B", 8, "--tensor-model-parallel-size 2 --sequence-parallel --params-dtype bf16"),
    ("glm4.5-106B-A12B", 64, "--tensor-model-parallel-size 8 --sequence-parallel --expert-model-parallel-size 32 "
     "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2 "),
    ("deepseek-v3", 512, "--tensor-model-parallel-size 8 --sequence-parallel --expert-model-parallel-size 32 "
     "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 8 --decoder-last-pipeline-num-layers 5"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "num_gpus", "layout"), LARGE, ids=[name for name, _, _ in LARGE])
def test_large_model_fits_with_a_layout_and_not_without(
    name: str, num_gpus: int, layout: str, model_dir: Callable[[str], str]
) -> None:
    batch = ["--rollout-batch-size", "512", "--n-samples-per-prompt", "1", "--rollout-num-gpus-per-engine", "8"]
    quantized = ["16", "--rollout-num-gpus", "64", "--sglang-quantization", "fp8"]
    engines = [*batch[:-1], *quantized] if name == "deepseek-v3" else batch
    shape = read_shape(model_dir(name))
    config = planned([*engines, *layout.split(), *FULL.split()], num_gpus + (64 if name == "deepseek-v3" else 0))
    plan = checked_plan(config, shape)
    assert plan.trainer and plan.trainer.peak_bytes < plan.gpu_bytes
    with pytest.raises(LayoutError, match=r"the trainer needs .* GiB per GPU .* but a GPU has 80.0 GiB: use more GPUs"):
        checked_plan(planned(batch[:-2], 8 if num_gpus > 8 else 1), shape)


# ---- penstock doctor --plan ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    """What `penstock doctor --plan` has printed: all, and the words of each row of the table by its name."""

    text: str
    rows: dict[str, list[str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., Printed]:
    """Runs `penstock doctor --plan`, and checks whether the plan fits."""

    def run(*words: str, fits: bool = True) -> Printed:
        assert main(["doctor", "--plan", *words]) == (0 if fits else 1)
        text = capsys.readouterr().out
        assert ("does not fit: " in text) == (not fits)
        return Printed(text, {line[:34].strip(): line[34:].split() for line in text.splitlines()})

    return run


def test_doctor_prints_the_plan_of_the_recipe(
    model_dir: Callable[[str], str], doctor: Callable[..., Printed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.flows.inspect.plan.visible_gpu_bytes", list)
    words = [*recipe_words("1gpu"), "--hf-checkpoint", model_dir("qwen3-0.6B")]
    plan = doctor(*words)
    assert plan.rows["trainer, weights"][:2] == ["1.1", "596,049,920"] and plan.rows["trainer"][0] == "38.7"
    assert plan.rows["engine, KV cache"][:2] == ["22.9", "214,300"] and plan.rows["engine"][0] == "24.0"
    assert plan.rows["shared GPU, both resident"] == ["62.7", "fits"]
    last = plan.text.splitlines()[-1]
    assert last.startswith("fits: a GPU shared by trainer and engines needs an estimated 62.7 of 80.0")
    doctor(*words, "--gpu-memory-gib", "40", fits=False)
    monkeypatch.setattr("penstock.flows.inspect.plan.visible_gpu_bytes", lambda: [40 * GIB, 24 * GIB])
    assert "24.0 GiB" in doctor(*words, fits=False).text


def test_4b_model_trains_on_one_80_gib_gpu(model_dir: Callable[[str], str], doctor: Callable[..., Printed]) -> None:
    """The command of docs/memory.md; a critic, a reference and a teacher fit, too, most of their state on the host."""
    words = ["--hf-checkpoint", model_dir("qwen3-4B"), "--gpu-memory-gib", "80", "--max-tokens-per-gpu", "16384"]
    words += ["--colocate", *FULL.split(), "--optimizer-cpu-offload", "--grad-reduce-in-bf16"]
    rows = doctor(*words).rows
    assert [rows[f"trainer, {name}"][0] for name in ("weights", "gradients", "optimizer")] == ["7.5", "7.5", "0.0"]
    assert rows["trainer"][0] == "39.7" and rows["host memory of a trainer rank"] == ["52.4", "weights,", "optimizer"]
    models = ["--advantage-estimator", "ppo", "--use-kl-loss", "--use-opd", "--opd-teacher-load", "teacher"]
    rows = doctor(*words, *models).rows
    assert rows["trainer, weights"][:3] == ["15.0", "8,044,938,752", "parameters"] and rows["trainer"][0] == "54.7"
    assert rows["host memory of a trainer rank"] == ["119.9", "reference,", "teacher,", "weights,", "optimizer"]
    doctor(*words[:-2], *models, fits=False)


def test_doctor_plans_the_heads_of_teachers_whose_distributions_are_over_the_vocabulary(
    model_dir: Callable[[str], str], doctor: Callable[..., Printed]
) -> None:
    words = ["--hf-checkpoint", model_dir("qwen3-4B"), "--gpu-memory-gib", "200", "--rollout-num-gpus", "1"]
    totals = []
    for teachers in ("--opd-self", "--opd-self --opd-top-k 8", "--opd-teacher-load a=/a b=/b"):
        rows = doctor(*words, "--opd-divergence", "jsd", *teachers.split()).rows
        totals.append((float(rows["trainer"][0]), float(rows.get("trainer, heads of teachers", ["0"])[0])))
    head = 151936 * 2560 * 2 / GIB
    assert [heads for _, heads in totals] == [pytest.approx(n * head, abs=0.05) for n in (1, 0, 2)]
    assert totals[2][0] - totals[1][0] == pytest.approx(2 * head, abs=0.11)


def test_doctor_plans_the_vision_tower(tmp_path: Path, doctor: Callable[..., Printed]) -> None:
    entries = qwen2_5(36, 2048, 11008, 16, 2, tied=True)
    (tmp_path / "config.json").write_text(json.dumps(entries))
    words = ["--hf-checkpoint", str(tmp_path), *FULL.split(), "--rollout-num-gpus", "1", "--gpu-memory-gib", "80"]
    tower, image, shape = 668_684_288, (1, 32, 32), shape_from_config(entries)
    gradients = []
    for flags, state, trained in (([], "frozen", False), (["--no-freeze-vision"], "trained", True)):
        plan = doctor(*words, *flags)
        gradients.append(float(plan.rows["trainer, gradients"][0]))
        table = " ".join(plan.text.split())
        weights = f"trainer, vision tower {tower * 2 / GIB:.1f} its weights, on the first pipeline stage; {state};"
        assert weights in table
        flops = shape.train_flops(256, 256**2, [image], trains_vision=trained)
        share = (flops - shape.train_flops(256, 256**2)) / flops
        assert f"{share:.0%} of the {flops / 1e12:.1f} TFLOP of a 448 x 448 image (256 tokens)" in table
    assert gradients[1] - gradients[0] == pytest.approx(4 * tower / GIB, abs=0.1)


def test_doctor_plans_separate_gpus_and_sft(model_dir: Callable[[str], str], doctor: Callable[..., Printed]) -> None:
    words = ["--hf-checkpoint", model_dir("qwen3-8B"), "--gpu-memory-gib", "80", *FULL.split(), "--num-gpus", "16"]
    text = doctor(*words, "--rollout-num-gpus", "8").text
    assert "8 GPUs: tensor 1" in text and "of the trainer or the engines" in text
    text = doctor(*words, "--loss-type", "sft_loss").text
    assert "16 GPUs: tensor 1" in text and "engine" not in text.replace("engines", "")
    large = doctor("--hf-checkpoint", model_dir("deepseek-v3"), "--gpu-memory-gib", "80", fits=False)
    assert "does not fit: the engine's weights exceed" in large.text


def test_doctor_plans_the_engine_of_a_teacher(model_dir: Callable[[str], str], doctor: Callable[..., Printed]) -> None:
    words = ["--hf-checkpoint", model_dir("qwen3-0.6B"), "--gpu-memory-gib", "80", *FULL.split(), "--num-gpus", "8"]
    words += ["--rollout-num-gpus", "2", "--opd-teacher-engine"]
    plan = doctor(*words, model_dir("qwen3-32B"), "--opd-teacher-num-gpus", "2")
    assert plan.rows["teacher, weights"][:3] == ["30.5", "2", "GPUs"] and "4 GPUs: tensor 1" in plan.text
    assert plan.rows["host memory of a trainer rank"] == ["0.0"], "the trainer does not load the teacher"
    large = doctor(*words, model_dir("deepseek-v3"), fits=False)
    assert "does not fit: the teacher's weights exceed" in large.text
    config = parse_config([*words[:2], *words[-1:], model_dir("deepseek-v3")])
    with pytest.raises(EngineError, match=r"the engine of --opd-teacher-engine needs .* raise --opd-teacher-num-gpus"):
        plans.check_memory(plans.plan_gpu_memory(Flow.TRAIN, config, read_shape(words[1]), 80 * GIB))
    with pytest.raises(LayoutError, match=r"the run needs 2 .*--opd-teacher-num-gpus for the teacher"):
        plans.check_gpu_sizes(Flow.TRAIN, config, read_shape(words[1]), 1)


# ---- preflight -------------------------------------------------------------------------------------------------------


def config_of(model: str, *words: str) -> PostTrainConfig:
    return parse_config(["--hf-checkpoint", model, "--rollout-batch-size", "64", "--n-samples-per-prompt", "8", *words])


def with_gpus(monkeypatch: pytest.MonkeyPatch, *sizes: int) -> None:
    monkeypatch.setattr(preflight, "visible_gpu_bytes", lambda: [size * GIB for size in sizes])


@pytest.mark.parametrize(
    ("name", "sizes", "words", "error", "message"),
    [
        ("qwen3-8B", [80], "", LayoutError,
         r"the trainer needs 137.3 GiB per GPU \(weights 15.3, gradients 30.5, optimizer 91.5\), but a GPU has 80.0 "),
        ("qwen3-0.6B", [24], "--sglang-mem-fraction-static 0.04", EngineError,
         r"an engine needs 1.1 GiB per GPU for weights, .*--sglang-mem-fraction-static\) is 1.0 of 24.0 GiB: raise"),
        ("qwen3-0.6B", [80, 24], "--actor-num-gpus-per-node 3", LayoutError, "has 2 GPUs, but the run needs 3 "),
        ("qwen3-0.6B", [], "--rollout-num-gpus-per-engine 2", LayoutError, "2 exceeds the trainer's 1 GPUs"),
        ("qwen3-0.6B", [], "--rollout-num-gpus-per-engine 2 --actor-num-gpus-per-node 3", LayoutError,
         "2 does not divide the trainer's 3 GPUs"),
        ("qwen3-0.6B", [], "--rollout-num-gpus-per-engine 8 --rollout-num-gpus 16 --num-gpus-per-node 6", LayoutError,
         "8 is neither a divisor nor a multiple of the 6 GPUs of a node"),
        ("qwen3-0.6B", [], "--actor-num-gpus-per-node 8 --num-gpus-per-node 4", LayoutError,
         "--actor-num-gpus-per-node 8 exceeds --num-gpus-per-node 4"),
        ("qwen3-0.6B", [], "--actor-num-nodes 2 --actor-num-gpus-per-node 6 --tensor-model-parallel-size 4",
         LayoutError, "--tensor-model-parallel-size 4 does not divide the 6 GPUs of a node"),
        ("qwen3-0.6B", [], "--rollout-num-gpus-per-engine 3 --rollout-num-gpus 3", LayoutError,
         "3 does not divide the model's 16 attention heads: use a divisor of 16"),
    ],
)  # fmt: skip
def test_preflight_refuses_what_cannot_fit(
    name: str, sizes: list[int], words: str, error: Any, message: str, model_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, *sizes)
    config = config_of(model_dir(name), *words.split())
    with pytest.raises(error, match=message) as raised:
        preflight.check_gpus(Flow.TRAIN, config, read_shape(model_dir(name)))
    assert len(str(raised.value)) < 390


@pytest.mark.parametrize(
    ("sizes", "flow", "words"),
    [
        ([80], "train", ""),
        ([80, 80], "train", "--rollout-num-gpus 1"),
        ([80], "evaluate", ""),
        ([80], "train", "--ray-address 10.0.0.1:6379 --actor-num-nodes 4 --actor-num-gpus-per-node 8"),
        ([80], "train", "--rollout-external-engine-addrs host:1 --rollout-num-gpus-per-engine 8"),
        ([], "train", "--rollout-num-gpus-per-engine 4 --rollout-num-gpus 4 --num-engines 2"),
        ([], "train", "--rollout-num-gpus-per-engine 16 --rollout-num-gpus 32 --num-gpus-per-node 8"),
        ([], "train", "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 16"),
    ],
)
def test_preflight_accepts_what_fits(
    sizes: list[int], flow: str, words: str, model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, *sizes)
    preflight.check_gpus(
        Flow(flow), config_of(model_dir("qwen3-0.6B"), *words.split()), read_shape(model_dir("qwen3-0.6B"))
    )


def test_activations_above_the_memory_only_warn(
    model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, 40)
    words = ("--max-tokens-per-gpu", "16384", "--sglang-mem-fraction-static", "0.3", "--sglang-cuda-graph-max-bs", "64")
    config = config_of(model_dir("qwen3-0.6B"), *words)
    preflight.check_gpus(Flow.TRAIN, config, read_shape(model_dir("qwen3-0.6B")))
    [warning] = preflight.config_warnings(resolve("train", config, STORE))
    assert "may need 50.7 GiB per GPU (weights, gradients and optimizer 10.0, activations and logits 23.7" in warning
    bf16 = [*FULL.split(), "--optimizer-cpu-offload", "--grad-reduce-in-bf16", "--max-tokens-per-gpu", "2048"]
    with_gpus(monkeypatch, 12)
    [warning] = preflight.config_warnings(
        resolve("train", config_of(model_dir("qwen3-0.6B"), *words[2:], *bf16), STORE)
    )
    assert "(weights, gradients and optimizer 2.2, optimizer step 4.3, engine 3.6)" in warning
    with_gpus(monkeypatch, 80)
    assert preflight.config_warnings(resolve("train", config, STORE)) == []


@pytest.mark.parametrize(
    ("words", "num_samples"),
    [
        ("", 512),  # 64 x 8 samples
        ("--engine-concurrency 100", 96),  # whole groups
        ("--engine-concurrency 4", 8),
        ("--rollout-batch-size 16 --over-sampling-batch-size 24", 192),
        ("--rollout-batch-size 16 --async-mode streaming --max-staleness 2", 384),
        ("--actor-num-gpus-per-node 4", 128),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus-per-engine 2", 256),
        ("--rollout-num-gpus 3 --eval-mode apart --eval-prompt-data a b.jsonl --eval-interval 1", 256),
        ("--rollout-num-gpus 2 --debug-rollout-only", 256),
    ],
)
def test_samples_in_flight_on_one_engine(words: str, num_samples: int) -> None:
    assert plans.samples_per_engine(config_of("model", *words.split())) == num_samples


def test_engines_that_would_generate_slowly_are_named_at_start_and_in_the_plan(
    model_dir: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, doctor: Callable[..., Printed]
) -> None:
    words = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2", "--max-tokens-per-gpu", "4096"]
    words += ["--hf-checkpoint", model_dir("qwen3-0.6B"), "--rollout-batch-size", "64", "--n-samples-per-prompt", "8"]

    def warnings(flow: str, more: str = "") -> list[str]:
        return preflight.config_warnings(resolve(flow, parse_config([*words, *more.split()]), STORE))

    with_gpus(monkeypatch, 48, 48, 48)
    [warning] = warnings("train")
    begin = "an engine may decode batches of 512 samples, but by default SGLang captures CUDA graphs for at most 32 on "
    assert warning.startswith(begin) and "give --sglang-cuda-graph-max-bs 512 if" in warning
    enough = "--sglang-cuda-graph-max-bs 512"
    for more in (enough, "--rollout-batch-size 4", "--debug-train-only", "--rollout-external-engine-addrs host:1"):
        assert warnings("train", more) == [], more
    assert warnings("evaluate") == warnings("sft") == []
    assert f"\nwarning: {warning}\n" in doctor(*words, "--gpu-memory-gib", "48").text
    assert "warning" not in doctor(*words, *enough.split(), "--gpu-memory-gib", "48").text


def test_tokens_of_a_micro_batch() -> None:
    assert plans.microbatch_tokens(parse_config(["--max-tokens-per-gpu", "4096"])) == 4096
    words = ["--micro-batch-size", "4", "--rollout-max-response-len", "1000"]
    assert plans.microbatch_tokens(parse_config(words)) == 4000
    two = ["--context-parallel-size", "2", "--actor-num-gpus-per-node", "2", "--rollout-max-context-len", "3000"]
    assert plans.microbatch_tokens(parse_config([*words, *two])) == 6000
