"""Generate trajectories by running a verifiers environment in a process of its own:
`--custom-generate-function-path examples/verifiers/generate.py`.

The process (environment.py) has another Python, `args.verifiers_python`, and reaches the model through the
OpenAI-compatible endpoint. It is started with the first sample and ends with this process.
"""

import asyncio
import itertools
import json
from pathlib import Path

PROGRAM = Path(__file__).with_name("environment.py")
_processes: dict[str, "asyncio.Task[Environment]"] = {}  # interpreter -> its process


async def generate(args, sample, sampling_params, engine):
    if args.verifiers_python not in _processes:
        _processes[args.verifiers_python] = asyncio.create_task(Environment.start(args.verifiers_python))
    environment = await _processes[args.verifiers_python]
    with engine.openai(sample) as session:
        result = await environment.run(
            example=sample.metadata["example"], base_url=session.base_url, api_key=session.api_key
        )
    samples = session.samples()
    for part in samples:
        part.reward = result["reward"]
    return samples


class Environment:
    """A process that runs rollouts. All of its requests are in flight at the same time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._ids = process, itertools.count()
        self._waiting: dict[int, asyncio.Future[dict]] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, python: str, program: Path = PROGRAM) -> "Environment":
        """Start the program with the given interpreter."""
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(python, str(program), "serve", stdin=pipe, stdout=pipe))

    async def run(self, **request) -> dict:
        """Return the result of one rollout.

        Raises:
            RuntimeError: the environment failed, or its process has ended.
        """
        if self._reader.done():
            raise RuntimeError("the process of the environment has ended; its output is above")
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps(request | {"id": number}).encode() + b"\n")
        result = await self._waiting[number]
        if result["error"]:
            raise RuntimeError(f"the environment failed: {result['error']}")
        return result

    async def _read(self) -> None:
        async for line in self._process.stdout:
            result = json.loads(line)
            self._waiting.pop(result["id"]).set_result(result)
        for future in self._waiting.values():
            future.set_exception(RuntimeError("the process of the environment has ended; its output is above"))
