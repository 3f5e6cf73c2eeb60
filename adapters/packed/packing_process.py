"""Packs an adapter's directory in a process of its own, so that no upload can hold up or end what serves.

Run as `python -m adapters.packed.packing_process`, it reads a request from its standard input, answers with the size of
the packed file, writes the file when it is told to, and answers again: one JSON object a line. It has limits on memory
and CPU time that follow from the size of the directory's files, and none of the caller's secrets in its environment.
"""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from adapters.errors import AdapterError, AdapterTooLarge, HostExhausted
from adapters.formats import Limits
from adapters.formats.positions import GivenPositions
from adapters.model.base_model import BaseModel, Experts
from adapters.model.manifest import Manifest
from adapters.model.serving import EngineDtype
from adapters.packed.packing import BeforeWriting, PackedSize, pack_directory
from process.lifetime import die_with_parent, how_ended

T = TypeVar("T")

# An honest import holds up to 2.2 times its files; a header of the largest size that is parsed takes 400 MB.
_MEMORY_BYTES, _MEMORY_PER_BYTE = 640 * 1024**2, 3
_CPU_S, _CPU_S_PER_BYTE = 60, 1 / (2 * 1024**2)
_WALL_PER_CPU = 4  # on a host that is busy
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "TMPDIR", "LANG", "LC_ALL")


def pack_in_process(
    directory: Path,
    target: Path,
    base: BaseModel,
    limits: Limits,
    dtype: EngineDtype,
    before_writing: BeforeWriting,
    positions: GivenPositions | None = None,
) -> PackedSize:
    """A `Packer` for directories of strangers. Blocking. Also raises HostExhausted if the process was ended."""
    num_bytes = min(_bytes_in(directory), 2 * limits.max_bytes)
    cpu_s = int(_CPU_S + num_bytes * _CPU_S_PER_BYTE)
    request = {
        "directory": str(directory),
        "target": str(target),
        "base": asdict(base),
        "limits": asdict(limits),
        "dtype": dtype,
        "positions": positions,
        "memory_bytes": _MEMORY_BYTES + _MEMORY_PER_BYTE * num_bytes,
        "cpu_s": cpu_s,
    }
    with _process(_WALL_PER_CPU * cpu_s) as process:
        answer = _ask(process, request)
        size = PackedSize(
            answer["revision_id"],
            Manifest.from_json(answer["manifest"]),
            answer["num_bytes"],
            tuple(answer["warnings"]),
        )
        before_writing(size)
        _ask(process, {"write": True})
    return size


def _bytes_in(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:  # `read_adapter` says what is wrong with it
        return 0


@contextmanager
def _process(timeout_s: float) -> Iterator[subprocess.Popen[str]]:
    """The process, ended with the block and after the time."""
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS_")}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},
            text=True,
            start_new_session=True,  # Ctrl-C is for the caller, which ends it
        )
    except OSError as error:
        HostExhausted.check(error)
        raise
    overdue = threading.Timer(timeout_s, process.kill)
    overdue.start()
    try:
        yield process
    finally:
        overdue.cancel()
        process.kill()
        process.communicate()


def _ask(process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """Send a request and return its answer. Raises the AdapterError that it has."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        how = f"the process that reads the adapter's files ended {how_ended(process.wait())}"
        if process.returncode >= 0:
            raise RuntimeError(how)
        raise HostExhausted(
            f"{how}: they took longer than files of their size do, or this host is short of memory; try again later"
        )
    answer = json.loads(line)
    if code := answer.get("error"):
        raise _errors_by_code(AdapterError)[code](answer["message"])
    return answer


def _errors_by_code(tree: type[AdapterError]) -> dict[str, type[AdapterError]]:
    found = {tree.code: tree}
    for branch in tree.__subclasses__():
        found |= _errors_by_code(branch)
    return found


# ---- inside the process -----------------------------------------------------------------------------------------


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing else may print among the answers
    request = json.loads(sys.stdin.readline())
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_DATA, (request["memory_bytes"], request["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    def wait_for_the_word(size: PackedSize) -> None:
        answer(**asdict(size) | {"manifest": size.manifest.to_json()})
        if not sys.stdin.readline():
            raise SystemExit  # the caller does not want the file

    dtype: EngineDtype = request["dtype"]
    base, limits = _base_model(request["base"]), _with_tuple(Limits, "target_modules", request["limits"])
    try:
        directory, target = Path(request["directory"]), Path(request["target"])
        pack_directory(directory, target, base, limits, dtype, wait_for_the_word, request["positions"])
    except AdapterError as error:
        answer(error=error.code, message=str(error))
    except MemoryError:
        answer(
            error=AdapterTooLarge.code,
            message=f"reading the adapter takes more than {request['memory_bytes']} bytes of memory, which no sound "
            "adapter with as few bytes of files does; save it again with fewer tensors",
        )
    else:
        answer(written=True)


def _base_model(fields: dict[str, Any]) -> BaseModel:
    experts = fields["experts"]
    return BaseModel(**fields | {"experts": experts and _with_tuple(Experts, "layers", experts)})


def _with_tuple(made: Callable[..., T], name: str, fields: dict[str, Any]) -> T:
    return made(**fields | {name: tuple(fields[name])})  # JSON has lists only


if __name__ == "__main__":
    main()
