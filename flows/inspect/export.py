"""`penstock export RUN`: write a run's checkpoint for other programs, as `penstock convert --load RUN` does, or one of
its rounds to a file for a bug report."""

from __future__ import annotations

from pathlib import Path

from penstock.engines.families import read_shape
from penstock.flows import convert
from penstock.flows.options import flags
from penstock.flows.options.argv import check_run_name, format_bytes, parse_integer, short_repr, split_args
from penstock.flows.runtime.runs import keys_of_existing_run, open_named_store, open_store, read_flow_and_config
from penstock.storage.commit import Commit
from penstock.storage.errors import OptionError, check_rules

USAGE = """penstock export RUN[/VERSION] --output DIR [--format hf|megatron|peft] [--store URI ...]
penstock export RUN --round R --output FILE.parquet [--store URI ...]

  Writes a checkpoint of a run (default: the newest) to DIR, a directory or URI. The result becomes visible when it is
  complete; a killed export resumes. If the run has exported this version with the same options, as it does after its
  last round, these files are copied.

  --format hf        Hugging Face files (the default); takes --export-dtype, --vocab-size, --mtp. LoRA adapters are
                     merged into the weights
  --format peft      a PEFT directory with the LoRA adapters of the run
  --format megatron  DIR/iter_0000020 and DIR/latest_checkpointed_iteration.txt, weights without the optimizer, which
                     Megatron-LM loads; takes --megatron-names local|te (default te)
  --output           the directory or URI

  --round R          write one trained round to a Parquet file, for a bug report: `penstock samples FILE.parquet`
                     recomputes its advantages, token weights and loss from it, without the model. It has no texts and
                     token ids. The loss of several optimizer steps needs a run with --keep-step-logprobs

  `penstock convert --help` describes the other options."""


def main(argv: list[str]) -> int:
    """Run `penstock export`. Return the exit code of the conversion."""
    positional, own, rest = split_args(argv, {"--format": True, "--output": True, "--round": True})
    reference, form = "".join(positional[:1]), own.get("--format", "hf")
    rules = (
        (
            len(positional) != 1 or "--output" not in own,
            "penstock export needs a run and a directory: penstock export RUN[/VERSION] --output DIR",
        ),
        ({"--format", "--round"} <= own.keys(), "--format and --round cannot be combined: give one of them"),
        (
            form not in ("hf", "megatron", "peft"),
            f"--format takes hf, megatron or peft; found {short_repr(form)}",
        ),
    )
    check_rules(rules)
    if "--round" in own:
        return export_round(check_run_name(reference), own, rest)
    if form == "peft":
        return export_adapters(reference, own["--output"], rest)
    run, slash, version = reference.partition("/")
    check_run_name(run)
    if slash and not version.isdecimal():
        raise OptionError(f"penstock export {reference}: {version!r} is not a policy version; give a number")
    words = ["--load", reference, "--save", own["--output"], *rest]
    if form == "megatron":
        names = [] if any(word.partition("=")[0] == "--megatron-names" for word in rest) else ["--megatron-names", "te"]
        words += ["--megatron-iteration", *names]
    return convert.main(words)


def export_round(run: str, own: dict[str, str], rest: list[str]) -> int:
    """Write one trained round to a file, and print how far its numbers are recomputed. Return 0."""
    from penstock.flows.inspect.read_samples import load_round, print_agreement
    from penstock.stages.train.recompute import recompute, write_round_file  # imports torch

    output, rollout_id = Path(own["--output"]), parse_integer("--round", own["--round"])
    if output.suffix != ".parquet" or output.exists():
        raise OptionError(f"--output {short_repr(str(output))} exists, or does not end with .parquet: give a new file")
    store = open_named_store(rest, "export --round")
    stored = load_round(store, keys_of_existing_run(store, run), rollout_id)
    write_round_file(stored, output)
    print(f"{output}: {format_bytes(output.stat().st_size)}, {len(stored.samples)} samples without texts")
    print_agreement(stored, recompute(stored))
    return 0


def export_adapters(reference: str, output: str, rest: list[str]) -> int:
    """Write the adapters of a run's checkpoint as a PEFT directory. Return 0."""
    from penstock.stages.convert.exported_adapters import export_peft

    config = flags.parse_config(["--convert-load", reference, "--convert-save", output, *rest])
    checkpoint = convert.find_checkpoint(config)
    if not isinstance(checkpoint, Commit):
        raise OptionError(f"penstock export {reference}: --format peft needs a run: give RUN or RUN/VERSION")
    _, recorded = read_flow_and_config(config.run, checkpoint.run or "")
    source = recorded.convert
    shape = read_shape(source.hf_checkpoint, source.model_family_path)
    print(f"writing the adapters of {checkpoint.run}, policy version {checkpoint.policy_version}: 2 files", flush=True)
    ref = export_peft(open_store(config.run, probe=False), checkpoint, shape, source.hf_checkpoint, output)
    size = format_bytes(int(convert.read_result_commit(config, ref).summary["export/num_bytes"]))
    hint = "peft.PeftModel.from_pretrained and --lora-load load it"
    print(f"adapters of policy {checkpoint.policy_version} of {checkpoint.run} ({size}): {ref.uri} ({hint})")
    return 0
