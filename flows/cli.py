"""The command line: `penstock demo | train | sft | convert | eval | resume | replay | fork | rm | verify | gc | deploy | runs | doctor`.

Thin: a command reads flags into a config, checks it, and calls a flow. Exit codes: 0 done, 1 failed, 2 the request was wrong (one sentence says why).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from flows import environment
from storage.errors import OptionError, PenstockError
from storage.secrets import redact

USAGE = """usage: penstock COMMAND [options]

  demo      make a tiny model and watch it learn, all stages, a few minutes on a laptop
  train     convert -> [rollout -> train -> publish -> checkpoint -> evaluate] x N -> export
  sft       the same loop over demonstrations (no engine)
  convert   Hugging Face checkpoint -> torch_dist, in the store or anywhere, and back
  eval      score a Hugging Face checkpoint on data sets; --rescore RUN grades stored samples again, --compare RUN/20 RUN/40 compares
  resume    go on with a run after its last committed stage:  penstock resume RUN [--store URI]
  replay    train a run's committed shards again and compare every step:  penstock replay RUN [--from A --to B]
  rm        remove a run:  penstock rm RUN
  fork      a new run from round N of another:  penstock fork RUN --at N --name NEW [options to change]
  verify    check every hash, reference and sample of a run:  penstock verify RUN
  gc        list what nothing needs any more; --delete removes it
  deploy    put the flows on a Prefect server, on a schedule if wanted
  runs      what lies in the store
  doctor    what is installed, what works, and what to do about the rest

`penstock COMMAND --help` lists the options. `--config FILE.toml` reads them from a file; --verbose shows the libraries' own logs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `penstock`."""
    words = list(sys.argv[1:] if argv is None else argv)
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if command not in COMMANDS:
        from flows.flags import nearest

        return _refuse(f"unknown command {command!r}{nearest(command, list(COMMANDS))}")
    verbose = "--verbose" in rest
    environment.prepare(verbose=verbose)
    try:
        return COMMANDS[command]([word for word in rest if word != "--verbose"])
    except (PenstockError, ValueError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("\npenstock: stopped; the same command goes on after the last committed stage", file=sys.stderr)
        return 130


def _train(words: list[str]) -> int:
    return _run_flow("post_train", words)


def _sft(words: list[str]) -> int:
    return _run_flow("sft", words)


def _evaluate(words: list[str]) -> int:
    given = {word.partition("=")[0] for word in words}
    for other in ("rescore", "compare"):  # of evaluations that were made: no engine, no flow
        if f"--{other}" in given:
            return _later(other)(words)
    code = _run_flow("evaluate", words)
    if given & {"--help", "-h"}:
        print("\nSee also `penstock eval --rescore --help` and `penstock eval --compare --help`.")
    return code


def _convert(words: list[str]) -> int:
    from flows import convert, flags
    from flows.registry import start

    if "--help" in words or "-h" in words:
        print(convert.USAGE)
        return 0
    return start("convert", convert.completed(flags.parse(convert.flags_of(words))))


def _run_flow(name: str, words: list[str]) -> int:
    from flows import flags
    from flows.registry import start

    if "--help" in words or "-h" in words:
        print(flags.help_text(name))
        return 0
    return start(name, flags.parse(words))


def _resume(words: list[str]) -> int:
    from flows.registry import start
    from flows.runs import resumed

    if not words or words[0].startswith("-"):
        raise OptionError("penstock resume needs the name of a run; `penstock runs` lists them")
    return start(*resumed(words[0], words[1:]))


def _runs(words: list[str]) -> int:
    from flows.flags import parse
    from flows.run_table import print_runs

    return print_runs(parse(words).run)


def _later(module: str) -> Callable[[list[str]], int]:
    """The command in `flows.<module>`, imported when it is called; its USAGE, if it has one, is what --help shows."""

    def call(words: list[str]) -> int:
        command = importlib.import_module(f"flows.{module}")
        if ("--help" in words or "-h" in words) and hasattr(command, "USAGE"):
            print(command.USAGE)
            return 0
        return command.main(words)

    return call


def _doctor(words: list[str]) -> int:
    from flows.doctor import examine

    return examine()


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": _later("demo"),
    "train": _train,
    "sft": _sft,
    "convert": _convert,
    "eval": _evaluate,
    "resume": _resume,
    "replay": _later("replay"),
    "fork": _later("fork"),
    "rm": _later("rm"),
    "verify": _later("verify"),
    "gc": _later("gc"),
    "deploy": _later("deploy"),
    "runs": _runs,
    "doctor": _doctor,
}


def _refuse(sentence: str) -> int:
    print(f"penstock: {redact(sentence)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
