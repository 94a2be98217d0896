"""`penstock export RUN`: write a run's checkpoint for other programs, as `penstock convert --load RUN` does."""

from __future__ import annotations

from penstock.engines.families import read_shape
from penstock.flows import convert
from penstock.flows.options import flags
from penstock.flows.options.argv import check_run_name, format_bytes, short_repr, split_args
from penstock.flows.runtime.runs import open_store, read_flow_and_config
from penstock.storage.commit import Commit
from penstock.storage.errors import OptionError

USAGE = """penstock export RUN[/VERSION] --output DIR [--format hf|megatron|peft] [--store URI ...]

  Writes a checkpoint of a run (default: the newest) to DIR, a directory or URI. The result becomes visible when it is
  complete; a killed export resumes. If the run has exported this version with the same options, as it does after its
  last round, these files are copied.

  --format hf        Hugging Face files (the default); takes --export-dtype, --vocab-size, --mtp. LoRA adapters are
                     merged into the weights
  --format peft      a PEFT directory with the LoRA adapters of the run
  --format megatron  DIR/iter_0000020 and DIR/latest_checkpointed_iteration.txt, weights without the optimizer, which
                     Megatron-LM loads; takes --megatron-names local|te (default te)
  --output           the directory or URI

  `penstock convert --help` describes the other options."""


def main(argv: list[str]) -> int:
    """Run `penstock export`. Return the exit code of the conversion."""
    positional, own, rest = split_args(argv, {"--format": True, "--output": True})
    if len(positional) != 1 or "--output" not in own:
        raise OptionError("penstock export needs a run and a directory: penstock export RUN[/VERSION] --output DIR")
    form = own.get("--format", "hf")
    if form not in ("hf", "megatron", "peft"):
        raise OptionError(f"--format takes hf, megatron or peft; found {short_repr(form)}")
    if form == "peft":
        return export_adapters(positional[0], own["--output"], rest)
    run, slash, version = positional[0].partition("/")
    check_run_name(run)
    if slash and not version.isdecimal():
        raise OptionError(f"penstock export {positional[0]}: {version!r} is not a policy version; give a number")
    words = ["--load", positional[0], "--save", own["--output"], *rest]
    if form == "megatron":
        names = [] if any(word.partition("=")[0] == "--megatron-names" for word in rest) else ["--megatron-names", "te"]
        words += ["--megatron-iteration", *names]
    return convert.main(words)


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
