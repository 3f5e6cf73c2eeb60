"""Training services: in this process, and in one of their own that tests kill. And what their clients send."""

import contextlib
import multiprocessing
import os
import random
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tinker
import torch
import uvicorn
import yaml
from starlette.requests import Request
from support.clusters.certificates import issued
from support.ports import two_ports
from support.waiting import wait_until

from cli.main import main
from cluster.control.transport import PLAIN, Transport
from process.certificates.authority import Authority
from process.free_ports import bound_socket
from router.api.training import TrainerAddress
from training.executor.device_memory import DeviceMemory
from training.executor.executor import ExecutorOptions
from training.executor.turns import Share
from training.loop.state import TrainingState
from training.runs.base import LoadedBase
from training.service import tinker_pb2 as pb
from training.service.app import Service, ServiceOptions
from training.service.errors import KeyRefused
from training.service.identity import Caller, Identities, headers_of_router

KEY = "tml-acme"
SECRET = "a secret of router and trainer, as long as one"
BACK_WITHIN_S = 120.0

os.environ["TINKER_TELEMETRY"] = "0"


class TenantKeys:
    """`tml-NAME` is the key of the tenant NAME."""

    async def caller(self, request: Request) -> Caller:
        key = request.headers.get("x-api-key", "")
        if not key.startswith("tml-"):
            raise KeyRefused("no key")
        return Caller(key.removeprefix("tml-"), key)

    async def check_operator(self, request: Request) -> None:
        raise KeyRefused("no operator")


@contextmanager
def served(app: Any) -> Iterator[str]:
    """The URL of an ASGI application, on loopback."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1))
    listener = bound_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def make_service(
    base: LoadedBase,
    folder: Path,
    router: str = "http://127.0.0.1:9",  # nobody is there
    name: str = "demo",
    identities: Identities | None = None,
    share_of: Callable[[str], Share] = lambda _tenant: Share(),
    status_at: tuple[str, int] | None = None,
    router_tls: Callable[[], ssl.SSLContext | bool] = lambda: True,
    **executor: Any,
) -> Service:
    folder.mkdir(exist_ok=True)
    options = ExecutorOptions(**{"row_tokens": 256, "snapshot_s": 1e9, **executor})
    found = ServiceOptions(name, folder, router, SECRET, status_at, options, share_of=share_of, router_tls=router_tls)
    return Service(base, identities or TenantKeys(), found)


class LosesAnswers:
    """An application that cuts off every third answer of each path after its head, once the work is done."""

    def __init__(self, app: Any) -> None:
        self._app, self._asked = app, Counter[str]()
        self.lost = Counter[str]()  # by the last part of the path

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        self._asked[scope["path"]] += 1
        if self._asked[scope["path"]] % 3:
            return await self._app(scope, receive, send)
        sent: list[Any] = []

        async def keep(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, keep)
        self.lost[scope["path"].rpartition("/")[2]] += 1
        await send(sent[0])  # then uvicorn closes the connection, because the body is missing
        return None


# Forks of a process that has imported what takes long.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        "cli.main",
        "training.service.server",
        "transformers.generation",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.modeling_llama",
    ]
)


def _run_command(words: list[str], log: Path) -> None:
    """The command, but with a second of computing between two snapshots, and with too little memory now and then."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    ExecutorOptions.__init__.__defaults__ = (256, 1.0, 2**26)  # type: ignore[misc]
    DeviceMemory.is_short = lambda _: random.random() < 0.2  # type: ignore[method-assign]
    main(words)


class KillableTrainer:
    """`prelude trainer` in a process of its own, always on the same port and folder.

    `headers`: those of a router's call for a client of the tenant `acme`. `ca`: for mutual TLS.
    """

    headers = headers_of_router(SECRET, "acme", None)

    def __init__(self, config: Path, folder: Path, ca: Authority | None = None) -> None:
        self.port = two_ports()
        self.url = f"http{'' if ca is None else 's'}://127.0.0.1:{self.port}"
        sections: dict[str, Any] = {}
        self.transport = PLAIN
        if ca is not None:
            self.transport = Transport(issued(ca, "router", "router", stem="router"))
            files = {"certificate": "{name}.crt", "key": "{name}.key", "ca": "ca.crt"}
            issued(ca, "trainer", "trainer", stem="trainer")
            sections["tls"] = {name: str(ca.folder / file) for name, file in files.items()}
        self._config, self.folder, self.log = config.with_name("trained.yaml"), folder, config.with_name("trainer.log")
        key = config.with_name("trainer.key")
        key.write_text(SECRET)
        trainer = {"url": self.url, "key": str(key), "folder": str(folder)}
        self._config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), **sections, "trainer": trainer}))

    @property
    def address(self) -> TrainerAddress:
        return TrainerAddress(self.url, SECRET, self.transport.engine_tls("trainer", "trainer"))

    def start(self) -> None:
        words = ["trainer", "--config", str(self._config), "--row-tokens", "256", "--device", "cpu"]
        self.process = _PROCESSES.Process(target=_run_command, args=(words, self.log), daemon=True)
        self.process.start()
        wait_until(self._is_up, BACK_WITHIN_S)

    def _is_up(self) -> bool:
        assert self.process.is_alive(), self.log.read_text()[-3000:]
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.join()


class RawClient:
    """Sends what no SDK would."""

    def __init__(self, url: str, key: str = KEY, headers: Mapping[str, str] | None = None) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers=headers or {"X-API-Key": key}, timeout=60)

    def post(self, path: str, /, **fields: Any) -> httpx.Response:
        return self.http.post(f"/{path}", json=fields)

    def session(self) -> str:
        return self.post("create_session", tags=[], sdk_version="0.38.0").json()["session_id"]

    def model(
        self,
        number: int = 0,
        session: str | None = None,
        kind: str = "lora",
        user_metadata: dict[str, str] | None = None,
        base_model: str = "demo",
        **lora: Any,
    ) -> str:
        fields: dict[str, Any] = {"base_model": base_model, "lora_config": {"rank": 4, "seed": 1, **lora}}
        fields["user_metadata"] = {"prelude.kind": kind, **(user_metadata or {})}
        created = self.post("create_model", session_id=session or self.session(), model_seq_id=number, **fields)
        return self.result(created)["model_id"]

    def forward_backward(self, model: str, seq: int, *data: pb.Datum, **fields: Any) -> httpx.Response:
        request = pb.ForwardBackwardRequest(
            model_id=model, seq_id=seq, data=data, **{"loss_fn": "cross_entropy"} | fields
        )
        return self.http.post("/forward_backward", content=request.SerializeToString())

    def optim_step(self, model: str, seq: int, **adam: Any) -> httpx.Response:
        return self.post("optim_step", model_id=model, seq_id=seq, adam_params={"learning_rate": 0.01, **adam})

    def retrieve(self, future: httpx.Response) -> httpx.Response:
        """The first answer that is not `try_again`."""
        assert future.status_code == 200, future.text
        while True:
            answer = self.post("retrieve_future", request_id=future.json()["request_id"])
            if b"try_again" not in answer.content:
                return answer

    def result(self, future: httpx.Response) -> Any:
        """JSON, or a ForwardBackwardOutput."""
        answer = self.retrieve(future)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return pb.ForwardBackwardOutput.FromString(answer.content)
        return answer.json()

    def error(self, future: httpx.Response) -> str:
        """Why a future failed."""
        failed = self.result(future)
        assert set(failed) == {"error", "category"}, failed
        return failed["error"]


@contextmanager
def serving(*arguments: Any, key: str = KEY, **options: Any) -> Iterator[RawClient]:
    """A client of a service that `make_service` makes."""
    with served(make_service(*arguments, **options).app()) as url:
        yield RawClient(url, key)


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> pb.Datum:
    """Of a sequence with its last token: targets are the tokens after each; `weights`, `answer`, …"""
    made = pb.Datum()
    made.model_input.add().encoded_text.tokens = np.array(tokens[:-1], np.int32).tobytes()
    put(made, "target_tokens", tokens[1:], np.int64)
    for name, values in inputs.items():
        put(made, name, values, np.float32)
    return made


def put(made: pb.Datum, name: str, values: Sequence[float], dtype: Any = np.float32) -> None:
    tensor = made.loss_fn_inputs[name]
    tensor.dense, tensor.dtype = np.array(values, dtype).tobytes(), {np.float32: 1, np.int64: 2}[dtype]
    tensor.shape[:] = [len(values)]


def logprobs_of(output: pb.ForwardBackwardOutput) -> list[np.ndarray]:
    """Of each datum."""
    [record] = output.loss_fn_outputs
    batched: Any = record.fields["logprobs"]
    ends = np.frombuffer(batched.offsets, np.int64)[1:-1] // 4
    return np.split(np.frombuffer(batched.data, np.float32), ends)


def sequence(number: int, length: int = 12) -> list[int]:
    """Token ids that an adapter can learn: the last ones repeat the first ones."""
    half = [3 + (number * 7 + index * 3) % 40 for index in range(length // 2)]
    return [*half, *half]


def data(*numbers: int) -> list[pb.Datum]:
    """Of these sequences, each of which has its second half as answer."""
    return [datum(sequence(number), weights=weights()) for number in numbers]


def send(client: RawClient, model: str, seq: int) -> httpx.Response:
    """Command `seq` of a plain run: two passes and a step, and so on."""
    if seq % 3 == 0:
        return client.optim_step(model, seq)
    return client.forward_backward(model, seq, *data(*((1, 2) if seq % 3 == 1 else (3,))))


def numbers_of(client: RawClient, model: str, seq: int) -> list[list[float]]:
    """What the model makes of some data now, by a forward pass with this number."""
    output = client.result(client.forward_backward(model, seq, *data(8, 9), forward_only=True))
    return [each.tolist() for each in logprobs_of(output)]


def weights(length: int = 12) -> list[float]:
    """Of the second half."""
    return [0.0] * (length // 2 - 1) + [1.0] * (length // 2)


def states(folder: Path, name: str) -> list[dict[str, bytes]]:
    """Parameters and moments of all checkpoints of this name, by their models' numbers."""
    found = sorted(folder.glob(f"checkpoints/*/{name}"), key=lambda each: int(each.parent.name.rpartition("-")[2]))
    return [
        {key: value.numpy().tobytes() for key, value in TrainingState.read(each / "training").tensors.items()}
        for each in found
    ]


ADAM = tinker.AdamParams(learning_rate=0.05, weight_decay=0.01, grad_clip_norm=1.0)


def sdk_data(step: int) -> list[tinker.Datum]:
    """Three sequences for the SDK."""
    found = []
    for number in range(3 * step, 3 * step + 3):
        tokens = sequence(number)
        inputs: Any = {"target_tokens": tokens[1:], "weights": weights()}
        found.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return found
