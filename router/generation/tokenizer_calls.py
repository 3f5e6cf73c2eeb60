"""Tokenizer calls. Any engine that is up can answer them, because all have the same tokenizer."""

import asyncio

import msgspec

from router.errors import AttemptError, DeadlineExceeded, NoWorkerAvailable
from router.generation.backends import Backends
from router.generation.engine_calls import EngineCall

TOKENIZE = "/v1/tokenize"
DETOKENIZE = "/v1/detokenize"


class _Text(msgspec.Struct):
    text: str | list[str]


async def ask_tokenizer(backends: Backends, path: str, body: bytes, rid: str) -> bytes:
    """The answer of the least busy engine or, if it fails, of the next one. Raises RouterError."""
    fleet = backends.fleet.state
    workers = [worker for worker in fleet.workers.values() if worker.is_placeable]
    workers.sort(key=lambda worker: (fleet.loads[worker.name].num_sequences, worker.name))
    failure: AttemptError | NoWorkerAvailable = NoWorkerAvailable("no worker can take the request now; try again soon")
    try:
        async with asyncio.timeout(backends.config.first_event_timeout_s):
            for worker in workers[: backends.config.max_attempts]:
                in_flight = backends.fleet.loads.add(worker.name)
                call = EngineCall(backends.engines, worker, path, body, rid, in_flight)
                watch = backends.fleet.watch(worker, call.fail)  # one that hangs would take all the time
                try:
                    call.start()
                    return await call.output
                except AttemptError as error:
                    if not error.retryable:
                        raise
                    failure = error
                finally:
                    watch.end()
                    call.leave()
    except TimeoutError:
        raise DeadlineExceeded("no engine's tokenizer answered in time") from None
    raise failure


async def detokenized(backends: Backends, tokens: msgspec.Raw, rid: str) -> str:
    """The text of token ids, without special tokens, as engines echo it. `tokens` is one list, or a list of one."""
    body = msgspec.json.encode({"tokens": tokens, "skip_special_tokens": True})
    text = msgspec.json.decode(await ask_tokenizer(backends, DETOKENIZE, body, rid), type=_Text).text
    return text if isinstance(text, str) else "".join(text)
