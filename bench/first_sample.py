"""From a trainer's weights to their first sample: `python -m bench.first_sample --help`.

`prelude up` runs a trainer beside a worker, or a pair, on one device. Each round trains a step, saves the weights for a
sampler and asks it for one token, by plain HTTP in Tinker's protocol, one call after the other.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import numpy as np
import yaml

from bench.errors import SystemFailed, WrongAnswer
from bench.measuring.output import require_folder, write_json
from bench.measuring.provenance import head
from bench.systems.models import MODELS, write_model
from process.free_ports import free_port
from training.service import tinker_pb2 as pb

_START_S, _STOP_S, _CALL_S = 600.0, 60.0, 120.0
_TOKENS = 64  # of a row; the second half is trained
_UNMEASURED = 2  # rounds, in which kernels are compiled
_TRY_AGAIN = b"try_again"

Options = argparse.Namespace


def _configuration(options: Options, folder: Path, port: int) -> dict[str, Any]:
    engine = {"device": options.device, "max_running_requests": 32, "max_total_tokens": 8192}
    workers: dict[str, Any] = {
        role: {"role": role} for role in (("prefill", "decode") if options.pair else ("unified",))
    }
    if options.device == "cuda":  # all on one GPU, beside the trainer
        share = "0.3" if options.pair else "0.45"
        arguments = ["--load-format", "dummy", "--mem-fraction-static", share, "--base-gpu-id", "0"]
        for worker in workers.values():
            worker["engine"] = {"extra_arguments": [*arguments, *options.engine_arguments]}
    return {
        "model": {"path": str(folder / "model"), "name": "bench", "dtype": "bfloat16"},
        "engine": engine,
        "router": {"port": port, "management": True},
        "workers": workers,
        "trainer": {
            "url": f"http://127.0.0.1:{free_port()}", "folder": str(folder / "trainer"), "key": str(folder / "key")
        },
        "adapter_limits": {"max_rank": options.rank},
    }  # fmt: skip


@contextmanager
def _cluster(options: Options, folder: Path) -> Iterator[httpx.Client]:
    """A client of the trainer's API, once the trainer and the workers are ready."""
    write_model(options.model, folder / "model", options.device, ())
    port, log, file = free_port(), folder / "up.log", folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(_configuration(options, folder, port)))
    with log.open("w") as output, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_CALL_S) as client:
        command = [sys.executable, "-m", "cli.main", "up", "--config", str(file)]
        up = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            client.headers["X-API-Key"] = "tml-bench"
            deadline = time.monotonic() + _START_S
            while not _is_ready(client):
                if up.poll() is not None or time.monotonic() > deadline:
                    raise SystemFailed(f"the cluster did not start: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield client
        finally:
            up.send_signal(signal.SIGINT)
            try:
                up.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                up.kill()


def _is_ready(client: httpx.Client) -> bool:
    try:
        return all(client.get(path).status_code == 200 for path in ("/ready", "/api/v1/get_server_capabilities"))
    except httpx.TransportError:
        return False


def _done(client: httpx.Client, command: str, content: bytes | None = None, **fields: Any) -> dict[str, Any]:
    """Send a command and wait for its outcome; of a training step, whose outcome is no JSON, nothing."""
    answer = _call(client, command, content=content) if content else _call(client, command, json=fields)
    number = answer.json()["request_id"]
    while True:
        outcome = _call(client, "retrieve_future", json={"request_id": number})
        if not outcome.headers["content-type"].startswith("application/json"):
            return {}
        found: dict[str, Any] = outcome.json()
        if "error" in found:
            raise WrongAnswer(f"{command}: {found}")
        if _TRY_AGAIN not in outcome.content:
            return found


def _call(client: httpx.Client, path: str, **content: Any) -> httpx.Response:
    answer = client.post(f"/api/v1/{path}", **content)
    if answer.status_code != 200:
        raise WrongAnswer(f"{path}: status {answer.status_code}: {answer.text[:300]}")
    return answer


def _row() -> pb.Datum:
    tokens = np.arange(3, _TOKENS + 4)
    datum = pb.Datum()
    datum.model_input.add().encoded_text.tokens = tokens[:-1].astype(np.int32).tobytes()
    weights = (np.arange(_TOKENS) >= _TOKENS // 2).astype(np.float32)
    targets = tokens[1:].astype(np.int64)
    for name, values, dtype in (("target_tokens", targets, pb.DTYPE_INT64), ("weights", weights, pb.DTYPE_FLOAT32)):
        tensor = datum.loss_fn_inputs[name]
        tensor.dense, tensor.dtype = values.tobytes(), dtype
        tensor.shape[:] = [_TOKENS]
    return datum


def _rounds(client: httpx.Client, options: Options) -> list[dict[str, float]]:
    """Seconds of each round's calls."""
    session = _call(client, "create_session", json={"tags": [], "sdk_version": "0.38.0"}).json()["session_id"]
    lora = {"rank": options.rank, "seed": 1}
    fields = {"session_id": session, "model_seq_id": 0, "base_model": "bench", "user_metadata": {}}
    model = _done(client, "create_model", lora_config=lora, **fields)["model_id"]
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    found = []
    for number in range(_UNMEASURED + options.rounds):
        sent = 3 * number
        row = pb.ForwardBackwardRequest(model_id=model, seq_id=sent + 1, data=[_row()], loss_fn="cross_entropy")
        began_s = time.perf_counter()
        _done(client, "forward_backward", row.SerializeToString())
        _done(client, "optim_step", model_id=model, seq_id=sent + 2, adam_params=adam)
        trained_s = time.perf_counter()
        saved = _done(
            client, "save_weights_for_sampler", model_id=model, seq_id=sent + 3, sampling_session_seq_id=number
        )
        saved_s = time.perf_counter()
        # A prompt that no earlier round has left in a prefix cache.
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [3 + number % 250, *range(3, 34)]}]}
        _done(
            client, "asample", sampling_session_id=saved["sampling_session_id"], seq_id=0, prompt=prompt,
            sampling_params={"max_tokens": 1, "seed": 1, "temperature": 1.0},
        )  # fmt: skip
        ended_s = time.perf_counter()
        found.append(
            {
                "train_s": trained_s - began_s,
                "save_s": saved_s - trained_s,
                "sample_s": ended_s - saved_s,
                "save_to_first_sample_s": ended_s - trained_s,
            }
        )
        print(*(f"{name} {seconds:.3f}" for name, seconds in found[-1].items()), file=sys.stderr)
    return found[_UNMEASURED:]


def measure(options: Options, command: str) -> dict[str, Any]:
    """The result, as a file has it."""
    result = head("first sample", command, vars(options), options.device)
    with tempfile.TemporaryDirectory() as folder, _cluster(options, Path(folder)) as client:
        rounds = _rounds(client, options)
    figures = {}
    for name in rounds[0]:
        seconds = [each[name] for each in rounds]
        figures[name] = {
            "p50": round(median(seconds), 4),
            "p95": round(quantiles(seconds, n=20, method="inclusive")[-1], 4),
        }
    return {
        **result,
        "figures": figures,
        "rounds": [{name: round(s, 4) for name, s in each.items()} for each in rounds],
    }


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.first_sample", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="tiny", help="sizes; default: tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--rank", type=int, default=32, help="of the LoRA; default: 32")
    parser.add_argument("--rounds", type=int, default=30, help="default: 30")
    parser.add_argument("--pair", action="store_true", help="a prefill and a decode worker; default: a unified one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument(
        "--engine-arguments", nargs=argparse.REMAINDER, default=[], help="the last option: words for engines"
    )
    words = sys.argv[1:]
    options = parser.parse_args(words)
    path = vars(options).pop("json")
    require_folder(path)
    found = measure(options, " ".join(["python -m bench.first_sample", *(Path(word).name for word in words)]))
    write_json(found, path)
    print(*(f"{name}: {each}" for name, each in found["figures"].items()), sep="\n")


if __name__ == "__main__":
    _main()
