"""Stands in for a prefill engine's processes: `python hangable_engine.py PORT FOLDER HOOK…`, or a part of it.

Its server, its scheduler with a KV thread, and its detokenizer are processes with the vital signs of real ones. A file
`kv-ends` in the folder ends the KV thread; while there is one called `spins`, the scheduler computes in its loop. It
maps a load report, a message queue and two semaphores in shared memory, and leaves them there.
"""

import http.server
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from multiprocessing.synchronize import SemLock
from pathlib import Path

from engine.vital_signs import Vitals, read_vitals

TICK_S = 0.05


def shared_memory(pid: int) -> list[Path]:
    """Of a scheduler, named as SGLang's, Python's and joblib's."""
    names = [f"sglang_loads_stand-in_{pid}.shm", f"sgl_shm_mq_{pid}_stand-in"]
    return [Path("/dev/shm") / name for name in (*names, *(f"sem.{each}" for each in semaphores(pid)))]


def semaphores(pid: int) -> list[str]:
    return [f"mp-stand-in_{pid}", f"loky-{pid}-stand-in"]


def server(port: int, folder: Path, hooks: list[str]) -> None:
    report(folder, "server", hooks)
    for part in ("sglang::scheduler", "sglang::detokenizer"):
        subprocess.Popen([sys.executable, __file__, part, str(folder), *hooks])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            rank = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 1}
            body = json.dumps({"loads": [rank]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_words) -> None: ...

    while len(list(folder.glob("*.json"))) < 3:
        time.sleep(TICK_S)
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def scheduler(folder: Path, hooks: list[str]) -> None:
    own, parts = Vitals(folder, "scheduler-0"), [Vitals(folder, "detokenizer"), Vitals(folder, "kv-0")]
    mapped: list[object] = []
    for path in shared_memory(os.getpid())[:2]:
        with path.open("w+b") as file:
            file.truncate(mmap.PAGESIZE)
            mapped.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    for name in semaphores(os.getpid()):
        SemLock._make_name = staticmethod(lambda name=name: f"/{name}")  # as joblib does
        mapped.append(multiprocessing.get_context("spawn").Lock())
    own.is_in_process(os.getpid())
    report(folder, "scheduler-0", hooks)  # last: with three reports the server serves, and tests ask for processes
    threading.Thread(target=answer, args=(folder, "kv-0"), daemon=True).start()
    while mapped:
        while (folder / "spins").exists():
            pass
        own.live()
        for part in parts:
            part.ask()
        time.sleep(TICK_S)


def answer(folder: Path, part: str) -> None:
    own = Vitals(folder, part)
    while not (part == "kv-0" and (folder / "kv-ends").exists()):
        if read_vitals(folder, part).owes_answer:
            own.live()
        time.sleep(TICK_S)


def report(folder: Path, process: str, hooks: list[str]) -> None:
    path = folder / f"{os.getpid()}.json"
    path.with_suffix(".partial").write_text(json.dumps({"process": process, "pid": os.getpid(), "hooks": hooks}))
    path.with_suffix(".partial").rename(path)


def main(what: str, folder: Path, hooks: list[str]) -> None:
    if what == "sglang::scheduler":
        scheduler(folder, hooks)
    elif what == "sglang::detokenizer":
        own, is_deaf = Vitals(folder, "detokenizer"), bool(os.environ.get("DEAF_DETOKENIZER"))
        own.is_in_process(0 if is_deaf else os.getpid())
        report(folder, "server", hooks)  # as real ones report
        if is_deaf:
            threading.Event().wait()
        answer(folder, "detokenizer")
    else:
        server(int(what), folder, hooks)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
