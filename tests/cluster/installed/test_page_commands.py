"""A newcomer's way through the pages: a fresh checkout, `make serve`, then every command as it stands there.

The demo's router has a port of its own. support/documents/not_run.py has the commands that are not run.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clusters.pretrained_model import needs_pretrained
from support.documents.desk import DEMO, IN_THE_CHECKOUT, TUTORIAL, Desk, commands_to_run, needs_workers
from support.documents.fresh_checkout import fresh_checkout
from support.documents.pages import PAGES, commands_of, promised_answer, promised_fields
from support.logged_process import logged_process
from support.training.served_answers import compared_answers
from support.waiting import wait_until

from process.free_ports import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(6 * 3600), needs_pretrained]

READY_WITHIN_S = 1200.0
ADOPTED_WITHIN_S = 60.0  # by the router: a changed alias
MOST, NEARLY_NONE = 0.6, 0.1


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A fresh checkout with the demo's folder, in which are a reader's own files, too."""
    folder = tmp_path_factory.mktemp("checkout")
    desk = Desk(fresh_checkout(folder), free_port(), [f"export PATH={folder}/.venv/bin:$PATH"])
    desk.run(f"prelude demo {DEMO}")
    config = folder / DEMO / "cluster.yaml"
    ports = f"router:\n  port: {desk.port}\n  admin: {{port: {free_port()}}}\n"
    config.write_text(config.read_text().replace("router:\n", ports))
    make_own_files(folder)
    desk.run("prelude adapters import acme/legal my-lora", DEMO)
    return desk


@pytest.fixture(scope="module")
def serving_desk(desk: Desk) -> Iterator[Desk]:
    """The same, while `make serve` runs there and is ready."""
    log = desk.checkout / "serve.log"
    with logged_process(["make", "DEVICE=cpu", "serve"], log, cwd=desk.checkout, env=desk.environment) as process:
        wait_until(lambda: process.poll() is not None or "Prelude is ready" in log.read_text(), READY_WITHIN_S)
        assert process.poll() is None, log.read_text()
        yield desk


def make_own_files(folder: Path) -> None:
    demo = folder / DEMO
    subprocess.run(["cp", "-r", demo / "adapters" / "pirate", demo / "my-lora"], check=True)
    rows = (demo / "data" / "brief-train.jsonl").read_text().splitlines(keepends=True)
    for name in ("train", "held-out", "prompts"):
        (demo / f"{name}.jsonl").write_text("".join(rows[:15]))


def run_page(desk: Desk, page: str) -> None:
    folder = "." if page in IN_THE_CHECKOUT else DEMO
    for command in commands_to_run(page):
        (desk.checkout / folder / "new.yaml").unlink(missing_ok=True)  # each `prelude init` is somebody's first
        printed = desk.follow(page, command, folder)
        if promised := promised_answer(page, command):
            assert answer_in(printed) == promised
        if fields := promised_fields(page, command):
            assert json.loads(printed).keys() == fields


TO_RUN = sorted((page for page in PAGES if page != TUTORIAL and commands_to_run(page)), key=lambda page: "/" in page)


@pytest.mark.parametrize("page", [page for page in TO_RUN if not needs_workers(page)])
def test_pages_without_workers(desk: Desk, page: str):
    run_page(desk, page)


@pytest.mark.parametrize("page", [page for page in TO_RUN if needs_workers(page)])
def test_pages_with_workers(serving_desk: Desk, page: str):
    run_page(serving_desk, page)


def answer_in(printed: str) -> str:
    return json.loads(printed)["choices"][0]["message"]["content"]


def exact_matches(printed: str) -> list[float]:
    """Of the base model, and of each adapter."""
    return [float(line.split()[-1]) for line in printed.splitlines()[2:]]


def comes_to_answer(desk: Desk, command: str, wanted: str | None) -> None:
    """A moved alias reaches the router after a while. Raises TimeoutError."""
    wait_until(lambda: json.dumps(wanted) in desk.run(f"{command} || true"), ADOPTED_WITHIN_S)


def test_the_tutorial(serving_desk: Desk, tmp_path: Path):
    commands = commands_of(TUTORIAL)
    export, ask_base, train, take_in, ask, rows, train_own, replace, ask_own, rollback, history, evaluate = commands
    desk = Desk(serving_desk.checkout, serving_desk.port, [export])
    assert desk.run("command -v prelude").strip() == f"{desk.checkout}/.venv/bin/prelude"
    plain = answer_in(desk.run(ask_base))
    desk.run(train)
    assert "tutor@r1 " in desk.run(take_in)
    promised, own = promised_answer(TUTORIAL, ask), promised_answer(TUTORIAL, ask_own)
    comes_to_answer(desk, ask, promised)
    assert len({plain, promised, own, None}) == 4

    held_out = (desk.checkout / DEMO / "data" / "json-held-out.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(held_out[:10]))  # those that are evaluated
    adapters = [None, ("tutor", desk.checkout / "runs/orders/last")]
    served = compared_answers(
        f"http://127.0.0.1:{desk.port}", desk.checkout / DEMO / "model", tmp_path / "rows.jsonl", adapters
    )
    assert all(each.served == each.offline for each in served)

    desk.run(rows)
    desk.run(train_own)
    assert "tutor@r2 " in desk.run(replace)
    comes_to_answer(desk, ask_own, own)
    desk.run(rollback)
    comes_to_answer(desk, ask, promised)
    assert answer_in(desk.run(ask_own.replace('"tutor"', '"tutor@r2"'))) == own
    assert answer_in(desk.run(ask_base)) == plain
    assert re.findall(r"(\w+) -> (\w+)", desk.run(history)) == [("r2", "r1"), ("r1", "r2"), ("new", "r1")]

    alone, trained = exact_matches(desk.run(evaluate))
    assert alone <= NEARLY_NONE
    assert trained >= MOST
    assert [each.exact_match for each in served] == pytest.approx([alone, trained], abs=0.01)
