"""`penstock export RUN`: write a run's checkpoint for other programs, as `penstock convert --load RUN` does."""

from __future__ import annotations

from penstock.flows import convert
from penstock.flows.options.argv import check_run_name, split_args
from penstock.storage.errors import OptionError

USAGE = """penstock export RUN[/VERSION] --output DIR [--format hf|megatron] [--store URI ...]

  Writes a checkpoint of a run (default: the newest) to DIR, a directory or URI. The result becomes visible when it is
  complete; a killed export resumes.

  --format hf        Hugging Face files (the default); takes --export-dtype, --vocab-size, --mtp
  --format megatron  DIR/iter_0000020 and DIR/latest_checkpointed_iteration.txt, weights without the optimizer, which
                     Megatron-LM and slime load; takes --megatron-names local|te (default te)
  --output           the directory or URI

  `penstock convert --help` describes the other options."""


def main(argv: list[str]) -> int:
    """Run the command. Return the exit code of the conversion.

    Raises:
        OptionError: an argument is invalid, or the run has no such checkpoint.
        RunError: the name of the run is invalid.
    """
    return convert.main(conversion_argv(argv))


def conversion_argv(argv: list[str]) -> list[str]:
    """Translate the arguments of `penstock export` to those of `penstock convert`. Raises OptionError or RunError."""
    positional, own, rest = split_args(argv, {"--format": True, "--output": True})
    if len(positional) != 1 or "--output" not in own:
        raise OptionError("penstock export needs a run and a directory: penstock export RUN[/VERSION] --output DIR")
    run, slash, version = positional[0].partition("/")
    check_run_name(run)
    if slash and not version.isdecimal():
        raise OptionError(f"penstock export {positional[0]}: {version!r} is not a policy version; give a number")
    form = own.get("--format", "hf")
    if form not in ("hf", "megatron"):
        raise OptionError(f"--format takes hf or megatron; found {form[:80]!r}")
    words = ["--load", positional[0], "--save", own["--output"], *rest]
    if form == "megatron":
        names = [] if any(word.partition("=")[0] == "--megatron-names" for word in rest) else ["--megatron-names", "te"]
        words += ["--megatron-iteration", *names]
    return words
