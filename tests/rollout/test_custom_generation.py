"""User-defined generate functions: every form, exact tokens and masks, and errors that fail only their sample."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from scripted_engine import ScriptedClient

from penstock.engines.generation import Generation
from penstock.stages.rollout.config import RolloutConfig
from penstock.stages.rollout.plugins import plugin_runner
from penstock.stages.rollout.plugins.custom_generation import CustomGeneration, load_generate_function
from penstock.stages.rollout.prompts.data_source import Group, RolloutRound
from penstock.stages.rollout.text.tokenizer import PromptTokenizer
from penstock.storage.samples.sample import Sample, Status

ROUND = RolloutRound("run", rollout_id=4, policy_version=4)
PROMPT = "7*8="


class ScriptedTurns(ScriptedClient):
    """Says the next of its texts to whoever asks, token by token, and an end token unless the text has a stop text."""

    def __init__(self, tokenizer: PromptTokenizer, texts: Sequence[str], version: str = "run/4") -> None:
        super().__init__(["http://127.0.0.1:30000"], weight_version=version)
        self.tokenizer, self.texts = tokenizer, texts
        self.requests: list[tuple[list[int], dict[str, Any], str | None]] = []  # type: ignore[assignment]
        self.turns: dict[str | None, int] = {}
        self.hangs_at: int | None = None  # turn that takes until it is aborted
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def generate(
        self, input_ids: list[int], sampling: dict[str, Any], n: int = 1, *, images: Any = (), session: Any = None
    ) -> list[Generation]:
        self.requests.append((input_ids, sampling, session))
        self.loops.add(asyncio.get_running_loop())
        turn = self.turns[session] = self.turns.get(session, -1) + 1
        while turn == self.hangs_at and not self._aborted:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        text = self.texts[turn % len(self.texts)]
        ids = self.tokenizer.encode([text])[0] + ([] if any(stop in text for stop in sampling.get("stop", ())) else [1])
        ids, whole = ids[: sampling["max_new_tokens"]], len(ids) <= sampling["max_new_tokens"]
        logprobs = [-(turn + 1.0) for _ in ids]
        if self._aborted:
            return [Generation(ids[:1], logprobs[:1], "abort", [(self.served_version, 1)])]
        return [Generation(ids, logprobs, "stop" if whole else "length", [(self.served_version, len(ids))])]


class Bench:
    def __init__(self, directory: Path, tokenizer: PromptTokenizer) -> None:
        self.directory, self.tokenizer = directory, tokenizer
        self.texts: Sequence[str] = ["56"]
        self.client = ScriptedTurns(tokenizer, self.texts)

    def path(self, code: str) -> str:
        file = self.directory / f"function{len(list(self.directory.glob('*.py')))}.py"
        file.write_text("import asyncio, copy, time\n" + dedent(code))
        return str(file)

    def group(self, n: int) -> Group:
        ids = self.tokenizer.encode([PROMPT])[0]
        made = []
        for index in range(n):
            name = f"000000001-{index:02d}"
            fields = {"prompt": PROMPT, "label": "56", "policy_versions": (4, 4), "metadata": {"i": index}}
            fields |= {"token_ids": list(ids), "loss_mask": [0] * len(ids), "rollout_logprobs": [0.0] * len(ids)}
            made.append(Sample(name, "000000001", name, 4, **fields))
        return made

    def generation(self, code: str, round: RolloutRound = ROUND, **options: Any) -> CustomGeneration:
        self.client = ScriptedTurns(self.tokenizer, self.texts)
        options = {"rollout_max_response_len": 40, "generate_timeout": 20.0} | options
        config = RolloutConfig(custom_generate_function_path=self.path(code), **options)
        return CustomGeneration(config, self.client, self.tokenizer, round)

    def run(
        self, code: str, n: int = 2, group: Group | None = None, round: RolloutRound = ROUND, **options: Any
    ) -> Group:
        async def filled() -> Group:
            async with self.generation(code, round, **options) as generation:
                return await generation(self.group(n) if group is None else group)

        return asyncio.run(filled())

    def one(self, code: str, **options: Any) -> Sample:
        (sample,) = self.run(code, n=1, **options)
        return sample

    def text(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode([token_ids], skip_special_tokens=False)[0]


@pytest.fixture
def bench(tmp_path: Path, tokenizer: PromptTokenizer) -> Bench:
    return Bench(tmp_path, tokenizer)


CALCULATOR = """
    async def generate(args, sample, sampling_params, engine):
        for _ in range(args.max_turns):
            text = await engine.generate(sample, stop=["="])
            if not text.endswith("=") or not engine.append(sample, "56\\n"):
                break
        return sample
"""


def test_two_turns_with_a_tool_token_by_token(bench: Bench) -> None:
    bench.texts = ["so 7*8=", "it is 56"]
    for sample in bench.run(CALCULATOR):
        num_prompt = len(PROMPT)
        assert sample.token_ids[:num_prompt] == bench.tokenizer.encode([PROMPT])[0]
        said, tool, rest = len("so 7*8="), len("56\n"), len("it is 56") + 1
        assert sample.loss_mask == [0] * num_prompt + [1] * said + [0] * tool + [1] * rest
        assert sample.rollout_logprobs == [0.0] * num_prompt + [-1.0] * said + [0.0] * tool + [-2.0] * rest
        assert sample.response == "so 7*8=56\nit is 56<|end|>" == bench.text(sample.token_ids[num_prompt:])
        assert sample.status is Status.COMPLETED
        assert (sample.metadata["num_turns"], sample.policy_versions) == (2, (4, 4))
    first, second = [request for request in bench.client.requests if request[2] == "000000001-01"]
    assert second[0] == first[0] + bench.tokenizer.encode(["so 7*8=56\n"])[0]  # nothing is tokenised twice
    assert second[1]["max_new_tokens"] == 40 - len("so 7*8=56\n")
    assert first[1]["stop"] == ["="] and first[1]["no_stop_trim"]
    assert len(bench.client.loops) == 1


FORMS = {
    "plain": "async def generate(args, sample, sampling_params):\n"
    "    await args.engine.generate(sample, **sampling_params)\n    return sample",
    "engine in between": "async def f(args, sample, engine, params):\n"
    "    await engine.generate(sample, **params)\n    return [sample]",
    "keywords": "async def f(args, sample, sampling_params, *, evaluation, **rest):\n"
    "    assert not evaluation and not rest\n"
    "    await args.engine.generate(sample)\n    return sample",
    "list": "async def custom_generate(args, samples, evaluation=False):\n"
    "    await asyncio.gather(*map(args.engine.generate, samples))\n    return tuple(samples[::-1])\n\n"
    "def helper(a): ...",
    "sync list": "def generate(args, samples, engine):\n"
    "    for s in samples:\n        asyncio.run(engine.generate(s))\n    return samples",
    "hidden async": "async def _f(args, sample):\n    await args.engine.generate(sample)\n    return sample\n\n"
    "def generate(args, sample):\n    return _f(args, sample)",
    "an object": "class _F:\n"
    "    async def __call__(self, args, sample, sampling_params, engine):\n        await engine.generate(sample)\n"
    "        return sample\n\ngenerate = _F()",
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(bench: Bench, form: str) -> None:
    path = FORMS[form]
    samples = bench.run(path, n=3)
    assert [sample.sample_id for sample in samples] == [f"000000001-{index:02d}" for index in range(3)]
    assert [sample.metadata["i"] for sample in samples] == [0, 1, 2]
    for sample in samples:
        assert (sample.status, sample.response, type(sample)) == (Status.COMPLETED, "56<|end|>", Sample), (
            sample.metadata
        )
    assert len(bench.client.loops) == 1, "the client is asked in its own loop, wherever the function runs"


def test_fan_out(bench: Bench) -> None:
    code = """
    async def generate(args, sample, sampling_params, engine):
        other = copy.deepcopy(sample)
        await engine.generate(sample)
        await engine.generate(other)
        other.loss_mask = [1]
        third = copy.deepcopy(sample)
        third.group_id = third.label = "mine"
        return [sample, other, third]
    """
    bench.texts = ["5", "6"]
    samples = bench.run(code, n=2)
    assert [sample.sample_id for sample in samples] == [
        *("000000001-00", "000000001-00.1", "000000001-00.2"),
        *("000000001-01", "000000001-01.1", "000000001-01.2"),
    ]
    assert {sample.trajectory_id for sample in samples[:3]} == {"000000001-00"}
    assert {(sample.group_id, sample.label) for sample in samples} == {("000000001", "56")}
    assert [sample.status for sample in samples[:3]] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    error = samples[1].metadata["error"]
    assert error.startswith("generate of ") and "loss_mask has 1 entries" in error


def test_budgets(bench: Bench) -> None:
    bench.texts = ["0123456789"]
    sample = bench.one(CALCULATOR, rollout_max_response_len=6)
    assert (sample.status, sum(sample.loss_mask)) == (Status.TRUNCATED, 6)
    sample = bench.one(CALCULATOR, rollout_max_response_len=30, rollout_max_context_len=len(PROMPT) + 5)
    assert (sample.status, sum(sample.loss_mask)) == (Status.TRUNCATED, 5)
    bench.texts = ["7*8="]
    sample = bench.one(CALCULATOR, rollout_max_response_len=6)  # no room for what the tool says: it is left out
    assert (sample.status, sample.response) == (Status.TRUNCATED, "7*8=")
    code = """
    async def generate(args, sample, engine):
        first = await engine.generate(sample, max_new_tokens=2)
        assert first == "78" and sample.status == "truncated", first
        assert engine.append(sample, [6, 7]) and await engine.generate(sample, max_new_tokens=50)
        assert not await engine.generate(sample)
        return sample
    """
    bench.texts = ["7812"]
    sample = bench.one(code, rollout_max_response_len=7)
    assert (sample.loss_mask[4:], sample.status) == ([1, 1, 0, 0, 1, 1, 1], Status.TRUNCATED), sample.metadata
    with pytest.raises(ValueError, match="leaves no room"):
        bench.one(CALCULATOR, rollout_max_context_len=2)


def test_seeds_and_evaluation(bench: Bench) -> None:
    code = """
    async def generate(args, sample, sampling_params, evaluation, engine):
        assert evaluation is True
        await engine.generate(sample)
        return sample
    """
    samples = bench.run(
        code, n=2, round=RolloutRound("run", 4, 4, kind="eval"), rollout_sampling_seeds=True, rollout_seed=7
    )
    assert all(sample.status is Status.COMPLETED for sample in samples), samples
    assert sorted(request[1]["sampling_seed"] for request in bench.client.requests) == [7, 8]


MISTAKES = {
    "await engine.generate(sample, temperature=0.3)": "raises PluginError: temperature 0.3",
    "raise KeyError('tool')": "raises KeyError: 'tool'",
    "raise asyncio.CancelledError": "the call was cancelled",
    "return None": "returned NoneType: return the sample, or a list of samples",
    "return [sample, 'x']": "returned str: return",
    "await engine.generate(sample); sample.loss_mask = [1]; return sample": "loss_mask has 1 entries",
    "await engine.generate(sample); sample.reward = float('nan'); return sample": "the reward function returned nan",
    "sample.status = 'failed'; sample.metadata['error'] = 'my own words'; return sample": "my own words",
    "await asyncio.sleep(60)": "takes more than 0.4 s",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_failing_function_fails_only_its_sample(bench: Bench, mistake: str) -> None:
    code = f"""
    async def generate(args, sample, sampling_params, engine):
        if sample.metadata["i"] == 1:
            {mistake}
        await engine.generate(sample)
        return sample
    """
    samples = bench.run(code, n=3, generate_timeout=0.4)
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED]
    reason = samples[1].metadata["error"]
    assert MISTAKES[mistake] in reason and "\n" not in reason
    assert "generate of " in reason or mistake.endswith("'my own words'; return sample")


def test_list_function_that_drops_a_sample_fails_it(bench: Bench) -> None:
    code = """
    async def generate(args, samples, engine):
        for sample in samples:
            await engine.generate(sample)
        return samples[:1]
    """
    samples = bench.run(code)
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED]
    assert "returned no sample with trajectory_id" in samples[1].metadata["error"]
    (sample,) = bench.run(code.replace("samples[:1]", "samples[0]"), n=1)
    assert "returned UserSample: return the list of samples" in sample.metadata["error"]


@pytest.mark.parametrize("form", ["async def", "def"])
def test_blocking_function_fails_only_its_sample(bench: Bench, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An async function that blocks its event loop: the other calls restart in a new loop."""
    monkeypatch.setattr(plugin_runner, "PATIENCE", 0.3)
    say = "await engine.generate(sample)" if form == "async def" else "asyncio.run(engine.generate(sample))"
    pause = "await asyncio.sleep(0.2)" if form == "async def" else "time.sleep(0.2)"
    code = f"""
    {form} generate(args, sample, sampling_params, engine):
        {pause}
        if sample.metadata["i"] == 1:
            time.sleep(3600)
        {pause}
        {say}
        return sample
    """
    samples = bench.run(code, n=3, generate_timeout=0.8)
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED, Status.COMPLETED], samples
    assert ("blocks its event loop" if form == "async def" else "takes more than 0.8 s") in samples[1].metadata["error"]
    assert bench.one(CALCULATOR).status is Status.COMPLETED  # nothing is left behind


def test_hanging_function_does_not_prevent_exit(bench: Bench) -> None:
    files = [
        bench.path("def generate(args, sample):\n    time.sleep(600)"),
        bench.path("async def generate(args, sample):\n    time.sleep(600)"),
    ]
    program = f"""
    import asyncio
    from penstock.stages.rollout.plugins import plugin_runner
    from penstock.stages.plugins import load_function
    plugin_runner.PATIENCE = 0.1
    async def main():
        for path in {files!r}:
            function = load_function(path)
            code = plugin_runner.PluginRunner("f", is_async="async" in open(path).read().split("def")[0].split()[-1:])
            try:
                await code.run(lambda: function(None, None), 0.2)
            except plugin_runner.PluginError as error:
                print(error)
    asyncio.run(main())
    """
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert "takes more than 0.2 s" in done.stdout and "blocks its event loop" in done.stdout


def test_event_loop_survives_between_rounds(bench: Bench) -> None:
    """What a module keeps, a semaphore or a connection say, belongs to one event loop."""
    code = """
    gate, homes = asyncio.Semaphore(1), set()

    async def generate(args, sample, engine):
        async with gate:
            homes.add(id(asyncio.get_running_loop()))
            await engine.generate(sample)
        sample.metadata["homes"] = len(homes)
        return sample
    """
    config = RolloutConfig(custom_generate_function_path=bench.path(code), rollout_max_response_len=40)

    async def filled() -> Group:
        client = ScriptedTurns(bench.tokenizer, ["56"])
        async with CustomGeneration(config, client, bench.tokenizer, ROUND) as generation:
            return await generation(bench.group(3))

    for _ in range(2):
        found = [(sample.status, sample.metadata["homes"]) for sample in asyncio.run(filled())]
        assert found == [(Status.COMPLETED, 1)] * 3


@pytest.mark.parametrize("continues", [False, True])
def test_aborted_samples_return(bench: Bench, continues: bool) -> None:
    """Aborted in the second turn: continued if the function supports it, otherwise the sample restarts."""
    code = """
    async def generate(args, sample, sampling_params, engine):
        if not sample.response:
            await engine.generate(sample, stop=["="])
            engine.append(sample, "56")
        await engine.generate(sample)
        sample.status = sample.Status.COMPLETED  # what the function thinks of it does not count
        return sample
    """ + (f"\n    generate.continues_partial = {continues}\n")
    bench.texts = ["7*8=", "right"]

    async def stopped() -> tuple[Group, Group]:
        async with bench.generation(code) as generation:
            bench.client.hangs_at = 1
            running = asyncio.create_task(generation(bench.group(2)))
            while len(bench.client.requests) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await generation.abort()
            late = await generation(bench.group(1))
            return await running, late

    samples, late = asyncio.run(stopped())
    assert [sample.status for sample in samples + late] == [Status.ABORTED] * 3
    assert not any(late[0].loss_mask)
    for sample in samples:
        assert sample.response == ("7*8=56" if continues else "")  # the last token before a stop is drawn again
        assert sample.loss_mask == [0] * 4 + ([1, 1, 1, 1, 0, 0] if continues else [])
    for sample in samples:
        sample.status = Status.PENDING
    code = """
    async def generate(args, sample, engine):
        sample.metadata["before"] = sample.response
        await engine.generate(sample)
        return sample
    """ + (f"\n    generate.continues_partial = {continues}\n")
    bench.texts = ["right"]
    for sample in bench.run(code, group=samples):
        assert sample.metadata["before"] == ("7*8=56" if continues else "")
        assert sample.response == ("7*8=56right<|end|>" if continues else "right<|end|>")
        assert sample.status is Status.COMPLETED and "num_prompt_tokens" not in sample.metadata


def test_function_without_continues_partial_restarts_sample(bench: Bench) -> None:
    """What the built-in generation has left, say, before the run was forked to use a function."""
    sample, finished = bench.group(2)
    finished.status, finished.response = Status.COMPLETED, "done before"
    sample.token_ids, sample.response = [*sample.token_ids, 11], "5"
    sample.loss_mask, sample.rollout_logprobs = [*sample.loss_mask, 1], [*sample.rollout_logprobs, -1.0]
    sample, same = bench.run(CALCULATOR, group=[sample, finished])
    assert (sample.response, sample.loss_mask) == ("56<|end|>", [0] * 4 + [1] * 3)
    assert same is finished and same.response == "done before"


def test_sample_aborted_after_tool_tokens_keeps_prompt(bench: Bench) -> None:
    code = """
    async def generate(args, sample, engine):
        if not sample.response_length:
            assert engine.append(sample, "hello")
            sample.status = "aborted"
            return sample
        assert sample.response_length == 5
        await engine.generate(sample)
        return sample
    generate.continues_partial = True
    """
    (sample,) = bench.run(code, n=1)
    assert (sample.status, sample.response) == (Status.ABORTED, "hello")
    sample.status = Status.PENDING
    (sample,) = bench.run(code, group=[sample])
    assert (sample.status, sample.response) == (Status.COMPLETED, "hello56<|end|>"), sample.metadata
    assert sample.loss_mask == [0] * 9 + [1] * 3


def test_slow_tool_does_not_delay_end_of_round(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_runner, "GRACE", 0.1)
    code = "async def generate(args, sample):\n    await asyncio.sleep(3600)"

    async def stopped() -> Group:
        async with bench.generation(code) as generation:
            running = asyncio.create_task(generation(bench.group(2)))
            await asyncio.sleep(0.1)
            await generation.abort()
            return await running

    assert [sample.status for sample in asyncio.run(stopped())] == [Status.ABORTED] * 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "try:\n            engine.client.served_version = 'run/3'; await engine.generate(sample)\n"
            "        except RuntimeError: pass",
            "weights 'run/3', expected 'run/4'",
        ),
        (
            "sample.append_response_tokens(args, tokens=[11], log_probs=[-1.0], meta_info={'weight_version': 'run/3'})",
            "weight version 'run/3', but expected 'run/4'",
        ),
    ],
    ids=["caught", "own request"],
)
def test_tokens_of_other_weights_end_the_round(bench: Bench, body: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        bench.run(f"async def generate(args, sample, engine):\n        {body}\n        return sample")


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("async def generate(args, sample, params, more): ...", "missing a required argument: 'more'"),
        ("async def generate(args, sample):\n    yield 1", "is a generator"),
        ("raise OSError('no key')", "fails to import: OSError: no key"),
    ],
)
def test_preflight(bench: Bench, code: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_generate_function(bench.path(code))
    load_generate_function(bench.path(CALCULATOR))


def test_cancelled_call_logs_no_unread_error(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stop_a_call() -> None:
        runner = plugin_runner.PluginRunner("f", is_async=True)
        call = asyncio.create_task(runner.run(lambda: asyncio.sleep(60), 30))
        await asyncio.sleep(0.05)
        await runner.stop()
        with pytest.raises(plugin_runner.Cancelled):
            await call
        del call
        await asyncio.sleep(0.05)
        gc.collect()

    monkeypatch.setattr(plugin_runner, "GRACE", 0.05)
    asyncio.run(stop_a_call())
    assert "never retrieved" not in caplog.text
