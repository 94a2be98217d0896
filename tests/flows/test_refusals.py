"""Invalid requests end in one line and exit code 2 before Prefect, Ray or an engine starts. test_bad_inputs.py tries
single options and files; these are combinations, and what depends on the machine."""

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest

from penstock.flows.cli import main
from penstock.flows.config import Flow
from penstock.flows.options.flags import parse_config, penstock_flags
from penstock.flows.options.refused import LISTED, OTHER_NAMES
from penstock.flows.runtime import preflight
from penstock.flows.runtime.preflight import plan_of
from penstock.storage.errors import OptionError, RewardError


@pytest.fixture
def good(tmp_path: Path, tiny_model: Path) -> dict[str, str]:
    """The options of a valid run."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i}+1=", "label": str(i + 1)}) + "\n" for i in range(8)))
    return {
        "--run": "r",
        "--store": str(tmp_path / "store"),
        "--hf-checkpoint": str(tiny_model),
        "--prompt-data": str(prompts),
        "--input-key": "prompt",
        "--label-key": "label",
        "--rm-type": "exact_number",
        "--num-rollout": "1",
        "--n-samples-per-prompt": "2",
        "--rollout-max-response-len": "8",
    }


def words_of(options: dict[str, str]) -> list[str]:
    return [word for pair in options.items() for word in pair if word]


def refusal(options: dict[str, str], capsys: pytest.CaptureFixture[str], command: str = "train") -> str:
    """What `penstock` says; it must be one sentence on stderr, with exit code 2, and Ray must not have been loaded
    for it."""
    loaded = "ray" in sys.modules
    code = main([command, *words_of(options)])
    out = capsys.readouterr()
    assert code == 2 and out.out == "" and out.err.startswith("penstock: ") and out.err.count("\n") == 1, out
    assert ("ray" in sys.modules) == loaded
    return out.err


@pytest.mark.parametrize("command", ["train", "eval", "train with an evaluation"])
def test_missing_label_in_any_row_is_refused_with_file_and_row(good, tmp_path: Path, capsys, command: str) -> None:
    late = tmp_path / "late.jsonl"
    rows = [{"prompt": "1+1=", "label": "2"}] * 1100 + [{"prompt": "2+2=", "label": ""}]
    late.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = good | (
        {"--prompt-data": str(late)} if command == "train" else {"--eval-prompt-data": "held", str(late): ""}
    )
    if command == "eval":
        for name in ("--prompt-data", "--num-rollout", "--n-samples-per-prompt"):
            options.pop(name)
    said = refusal(options, capsys, command.split()[0])
    assert f"{late} row 1100: the row has no label" in said and "'label'" in said


@pytest.fixture(scope="module")
def bf16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose widths are multiples of a block of fp8 weights. Read only."""
    from penstock.flows.commands.demo_model import make_tiny_model

    directory = tmp_path_factory.mktemp("models") / "bf16"
    return make_tiny_model(directory, heads=4, groups=2, head_dim=64, ffn=256, dtype="bfloat16")


@pytest.fixture(scope="module")
def fp8_model(bf16_model: Path) -> Path:
    """`bf16_model` with projections in block fp8. Read only."""
    from safetensors.torch import load_file

    from penstock.engines.sglang.weight_sender import write_weights
    from penstock.engines.weights.fp8_blocks import QUANTIZATION, quantize_weights, should_quantize

    weights = load_file(bf16_model / "model.safetensors")
    names = {name for name, tensor in weights.items() if should_quantize(name, tuple(tensor.shape))}
    directory = bf16_model.with_name("fp8")
    write_weights(directory, quantize_weights(weights.items(), names), bf16_model, 1 << 30)
    change_quantization(directory, QUANTIZATION)
    return directory


def change_quantization(directory: Path, quantization: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def test_online_quantization_is_refused_for_training(good, capsys) -> None:
    """A weight update would fill the parameters with wrong values."""
    for method in ("fp8", "awq"):
        message = refusal(good | {"--sglang-quantization": method}, capsys)
        assert f"--sglang-quantization {method}" in message and "--export-dtype fp8" in message


@pytest.mark.parametrize(
    ("name", "value"), [("quant_method", "gptq"), ("weight_block_size", [64, 64]), ("scale_fmt", "ue8m0")]
)
def test_other_quantized_checkpoints_are_refused_for_training(
    good, name: str, value: object, fp8_model: Path, tmp_path: Path, capsys
) -> None:
    from penstock.engines.weights.fp8_blocks import QUANTIZATION

    other = shutil.copytree(fp8_model, tmp_path / "other")
    change_quantization(other, QUANTIZATION | {name: value})
    message = refusal(good | {"--hf-checkpoint": str(other)}, capsys)
    assert str(other) in message and "quantization_config" in message and name in message


def test_fp8_checkpoint_is_refused_for_training_without_a_gpu_that_keeps_its_layout(
    good, fp8_model: Path, bf16_model: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    options = good | {"--hf-checkpoint": str(fp8_model)}
    for capabilities, found in (([], "no GPU"), ([(8, 0)], "capability 8.0"), ([(9, 0), (10, 0)], "9.0, 10.0")):
        monkeypatch.setattr(preflight, "visible_gpu_capabilities", lambda values=capabilities: values)
        assert found in refusal(options | {"--seed": str(len(found))}, capsys)
    monkeypatch.setattr(preflight, "visible_gpu_capabilities", lambda: [(9, 0)])
    half = {"--rollout-num-gpus": "4", "--rollout-num-gpus-per-engine": "4", "--num-gpus-per-node": "4"}
    assert "64 rows for each of the 4 GPUs" in refusal(options | half, capsys)
    for further in ({}, {"--ref-load": str(bf16_model)}, {"--sglang-quantization": "fp8"}):
        preflight.preflight(plan_of("train", parse_config(words_of(options | further))))
    alone = {"--ref-load": str(bf16_model), "--debug-rollout-only": "true"}
    assert "--debug-rollout-only" in refusal(options | alone, capsys)


@pytest.mark.parametrize(
    "flag",
    ["--rollout-sampling-seeds true", "--sglang-speculative-algorithm EAGLE --sglang-speculative-draft-model {}"],
)
@pytest.mark.parametrize("flow", ["train", "evaluate"])
def test_options_that_need_gpus_are_refused_on_a_machine_without_gpus(
    good, flag: str, flow: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words_of(good), *flag.format(tiny_model).split(), "--eval-prompt-data", "sums", good["--prompt-data"]]
    monkeypatch.setattr(preflight, "visible_gpu_capabilities", lambda: [])
    with pytest.raises(OptionError, match=f"{flag.split()[0]} was given, but no GPU was found .* use a machine"):
        preflight.preflight(plan_of(flow, parse_config(words)))
    preflight.preflight(plan_of(flow, parse_config([*words, "--ray-address", "10.0.0.7:6379"])))  # unknown GPUs
    monkeypatch.setattr(preflight, "visible_gpu_capabilities", lambda: [(9, 0)])
    preflight.preflight(plan_of(flow, parse_config(words)))


def test_training_with_fp8_engines_starts_from_ref_load(good, fp8_model: Path, bf16_model: Path, tmp_path) -> None:
    from penstock.engines.weights.transfer import INITIAL
    from penstock.flows.runtime.processes import Processes
    from penstock.flows.runtime.publishing import PolicyPublisher
    from penstock.flows.runtime.runs import ActiveRun
    from penstock.storage.commit import RunKeys
    from penstock.storage.store import Store

    def publisher(*words: str, has_trainer: bool = True) -> PolicyPublisher:
        config = parse_config([*words_of(good | {"--hf-checkpoint": str(fp8_model)}), *words])
        run = ActiveRun(Store(str(tmp_path / "store")), RunKeys("r"), Flow.TRAIN, config)
        return PolicyPublisher(Processes(run, print, has_trainer=has_trainer), print)

    ref_load = ("--ref-load", str(bf16_model))
    for built, version, model in (
        (publisher(), "r/0", fp8_model),
        (publisher(*ref_load), INITIAL, bf16_model),  # the trainer sends version 0
        (publisher(*ref_load, has_trainer=False), "r/0", bf16_model),
        (publisher("--check-weight-update-equal"), INITIAL, fp8_model),
    ):
        assert built.processes.engine_options.spec.weight_version == version
        assert built.config.start_weights == str(model)
    assert str(bf16_model) in (publisher(*ref_load).reason_against_initial_comparison() or "")
    assert publisher().reason_against_initial_comparison() is None


def test_taken_port_is_refused(good, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        message = refusal(good | {"--engine-port": port}, capsys)
    assert port in message and "--engine-port" in message


def test_contradicting_numbers_and_flags_are_refused(good, capsys) -> None:
    sizes = {"--rollout-batch-size": "6", "--n-samples-per-prompt": "4", "--global-batch-size": "16"}
    assert "= 24 samples" in refusal(good | sizes, capsys)
    assert "sft_loss" in refusal(good | {"--loss-type": "sft_loss"}, capsys)

    assert "--run is missing" in refusal({name: value for name, value in good.items() if name != "--run"}, capsys)
    assert "did you mean train?" in refusal({}, capsys, command="trian")
    for theirs, ours in (
        ("--rollout-batchsize", "--rollout-batch-size"),
        ("--sglang-mem-fraction", "--sglang-mem-fraction-static"),
        ("--rl", "--lr"),
        ("--batch-size", "--rollout-batch-size or --global-batch-size"),
        ("--num_train_epochs", "--num-epoch"),
    ):
        assert f"did you mean {ours}?" in refusal(good | {theirs: "6"}, capsys)


def test_every_name_of_another_trainer_is_free_and_stands_for_options() -> None:
    for name, flags in OTHER_NAMES.items():
        assert f"--{name}" not in penstock_flags() and f"--{name}" not in LISTED, name
        assert all(flag in penstock_flags() or flag.startswith("--sglang-") for flag in flags.split()), flags


def test_invalid_auxiliary_models_and_training_functions_are_refused(good, tmp_path: Path, capsys) -> None:
    from penstock.flows.commands.demo_model import make_tiny_model

    other = make_tiny_model(tmp_path / "wider", hidden=64, heads=4, groups=2, head_dim=16)
    said = refusal(good | {"--ref-load": str(other), "--use-kl-loss": ""}, capsys)
    assert "the reference" in said and "has head_dim 16, but the policy has 32" in said
    for flag in ("--ref-load", "--opd-teacher-engine"):
        said = refusal(good | {"--use-kl-loss": "", flag: str(tmp_path / "nowhere")}, capsys)
        assert "nowhere" in said and flag in said, said
    said = refusal(good | {"--custom-advantage-function-path": "mine.py:f"}, capsys)
    assert "mine.py does not exist" in said
    assert "has no experts" in refusal(good | {"--use-routing-replay": ""}, capsys)
    assert "--normalize-advantages" in refusal(good | {"--advantage-estimator": "reinforce_plus_plus"}, capsys)


def test_a_reward_server_named_by_a_reference_is_reached(good, monkeypatch, capsys) -> None:
    words = words_of(good | {"--rm-type": "remote_rm", "--rm-url": "env:GRADER_OF_A_TEST"})
    with socket.create_server(("127.0.0.1", 0)) as grader:
        address = f"http://127.0.0.1:{grader.getsockname()[1]}/score"
        monkeypatch.setenv("GRADER_OF_A_TEST", address)
        preflight.preflight(plan_of("train", parse_config(words)))
    with pytest.raises(RewardError, match="does not answer"):
        preflight.preflight(plan_of("train", parse_config([*words, "--run", "another"])))
