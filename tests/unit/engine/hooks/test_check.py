"""What another SGLang release means for a hook, by small packages in place of SGLang's."""

from __future__ import annotations

import hashlib
import importlib.metadata
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.hooks import check
from engine.hooks.check import Finding, compare, lost_imports, target_of
from engine.hooks.hook import Hook, HookKind
from engine.hooks.installation import BUILTIN
from engine.hooks.sources import Sources

STEP = """    def step(self, batch):
        for req in batch.reqs:
            self.run(req)
        return len(batch.reqs)
"""
LOOP = f"class Loop:\n    def __init__(self):\n        self.ps = self.run = print\n\n{STEP}\n\nLoop().step([])\n"
THREADS = """import threading

def bootstrap():
    pass

def start():
    threading.Thread(target=bootstrap).start()
"""


def written(folder: Path, files: dict[str, str]) -> Sources:
    for name, text in {"sglang/__init__.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Sources(folder)


def hook_into(target: str, source: str, kind: HookKind = HookKind.AROUND) -> Hook:
    fn = SimpleNamespace(__module__="engine.hooks.bodies", __qualname__="body")
    return Hook("it", target, fn, hashlib.sha256(source.encode()).hexdigest(), "", kind)  # type: ignore[arg-type]


def compared(tmp_path: Path, hook: Hook, before: str, after: dict[str, str], body: str = "") -> Finding:
    """The target is in sglang/loop.py at the pin, and the hook's body is `body`."""
    pin = written(tmp_path / "pin", {"sglang/loop.py": before})
    other = written(tmp_path / "other", {f"sglang/{name}": text for name, text in after.items()})
    return compare(hook, pin, other, written(tmp_path / "own", {"engine/hooks/bodies.py": body}))


def test_a_changed_method_is_shown(tmp_path: Path):
    after = {"loop.py": LOOP.replace("return len(batch.reqs)", "return 1")}
    found = compared(tmp_path, hook_into("sglang.loop.Loop.step", STEP), LOOP, after)
    assert (found.status, found.diff[-2:]) == ("changed", ("-        return len(batch.reqs)", "+        return 1"))


@pytest.mark.parametrize(
    ("after", "status", "note"),
    [
        ({"loop.py": f"import os\n\n{LOOP}"}, "unchanged", ""),
        ({"steps.py": LOOP}, "moved", " to `sglang.steps, line 5`, it seems"),
        ({"loop.py": LOOP.replace("step", "go")}, "moved", " to `sglang.loop, line 5`, it seems"),
        ({"loop.py": "class Loop:\n    def step(self):\n        return 1\n"}, "changed", ", and nothing uses it"),
        ({"steps.py": "def step():\n    return 1\n"}, "gone", ""),
    ],
)
def test_where_a_method_went(tmp_path: Path, after: dict[str, str], status: str, note: str):
    found = compared(tmp_path, hook_into("sglang.loop.Loop.step", STEP), LOOP, after)
    assert (found.status, found.note, found.is_harmless) == (status, note, status == "unchanged")
    assert compared(tmp_path, hook_into("torch.add", ""), LOOP, {}).status == "in another package"


def test_an_attribute_has_gone_though_the_target_is_unchanged(tmp_path: Path):
    body = "def body(it):\n    note(it)\n\ndef note(loop):\n    print(loop.ps, loop.run, loop.own, len('run'))\n"
    hook, after = hook_into("sglang.loop.Loop.step", STEP), LOOP.replace("self.ps = ", "")
    found = compared(tmp_path, hook, LOOP, {"loop.py": after}, body)
    assert (found.status, found.lost, found.is_harmless) == ("unchanged", ("**`ps`**",), False)
    found = compared(tmp_path, hook, LOOP, {"loop.py": after, "other.py": "ps = 1\n"}, body)
    assert found.lost == ("`ps`",)


def test_a_thread_that_a_hook_knows_by_name_has_another(tmp_path: Path):
    """The old name is still there, as in `bootstrap_thread_guarded`, which calls `bootstrap_thread`."""
    after = THREADS.replace("=bootstrap)", "=guarded)") + "\ndef guarded():\n    bootstrap()\n"
    body = "def body(threading):\n    return NAME\n\nNAME = 'bootstrap'\n"
    hook = hook_into("sglang.loop.threading", THREADS, HookKind.GLOBAL)
    found = compared(tmp_path, hook, THREADS, {"loop.py": after}, body)
    assert (found.status, found.lost) == ("changed", ("`bootstrap`",))
    found = compared(tmp_path, hook, THREADS, {"loop.py": THREADS + "\ndef more():\n    bootstrap()\n"}, body)
    assert (found.status, found.lost, found.diff) == ("digest only", (), ())
    found = compared(tmp_path, hook, THREADS, {"loop.py": THREADS + "\nclass Loop(threading.Thread):\n    pass\n"})
    assert (found.status, found.diff[-1]) == ("changed", "+class Loop(threading.Thread):")


def test_a_name_that_a_module_imports_is_compared_with_its_uses_there(tmp_path: Path):
    step = "def step():\n    return 1\n"
    user = "from sglang.loop import step\n\ndef loop():\n    step()\n"
    pin = written(tmp_path / "pin", {"sglang/loop.py": step, "sglang/user.py": user})
    hook, own = hook_into("sglang.user.step", step), Sources(tmp_path)
    assert compare(hook, pin, pin, own).status == "unchanged"
    other = written(tmp_path / "other", {"sglang/loop.py": step, "sglang/user.py": user.replace("step()", "pass")})
    assert compare(hook, pin, other, own).note == ", and nothing uses it"
    (tmp_path / "other/sglang/user.py").write_text("")
    assert compare(hook, pin, Sources(tmp_path / "other"), own).note == " to `sglang.loop, line 1`, it seems"


def test_imports_that_fail_in_the_other_release(tmp_path: Path):
    pin = written(tmp_path / "pin", {"sglang/a/__init__.py": "from sglang.b import *\n", "sglang/b.py": "x = y = 1\n"})
    other = written(tmp_path / "other", {"sglang/a/__init__.py": "from sglang.b import *\n", "sglang/b.py": "x = 1\n"})
    body = "def body():\n    from sglang.a import x, y, z\n\nCLASS = 'sglang.b.y'\n"
    own = written(tmp_path / "own", {"engine/hooks/bodies.py": body, "engine/hooks/ledger/it.py": "T = 'sglang.b.y'\n"})
    assert sorted(lost_imports(pin, other, own)) == [f"- `sglang.{each}.y`, in `engine.hooks.bodies`" for each in "ab"]


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, loop in (("pin", LOOP), ("other", LOOP.replace("in batch", "in list"))):
        asked = f"Requires-Dist: torch=={name}\nRequires-Dist: x; extra == '{name}'\n"
        written(tmp_path / name, {"sglang/loop.py": loop, "sglang-1.dist-info/METADATA": asked})
    monkeypatch.setattr(check, "HOOKS", (hook_into("sglang.loop.Loop.step", STEP),))
    monkeypatch.setattr(check, "SGLANG_VERSION", str(tmp_path / "pin"))
    assert check.main(str(tmp_path / "pin")) == 0
    assert "1 hooks: 1 unchanged." in capsys.readouterr().out
    assert check.main(str(tmp_path / "other")) == 1
    page = capsys.readouterr().out
    assert "| it | `sglang.loop.Loop.step` | changed | +1 −1 |  |" in page
    assert "~~~diff\n- torch==pin\n+ torch==other\n~~~" in page
    assert "+        for req in list.reqs:" in page.split("\n## it\n")[1]


@pytest.mark.slow
def test_the_pin_is_read_as_the_ledger_has_it():
    """So the digests of the check are those that engines compute when they start."""
    pin = Sources(Path(str(importlib.metadata.distribution("sglang").locate_file(""))))
    for hook in check.HOOKS:
        if hook.source_sha256 != BUILTIN:
            found = target_of(hook, pin)
            assert found, hook.name
            assert hashlib.sha256(found.digested.encode()).hexdigest() == hook.source_sha256, hook.name


def test_a_release_is_downloaded_and_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str]) -> SimpleNamespace:
        assert command[2:4] == ["pip", "download"]
        assert {"--no-deps", "sglang==9.9"} < set(command)
        (tmp_path / "9.9").mkdir()
        with zipfile.ZipFile(tmp_path / "9.9" / "sglang-9.9-py3-none-any.whl", "w") as wheel:
            wheel.writestr("sglang/loop.py", LOOP)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    assert Sources(check.folder_of("9.9", tmp_path)).find("sglang.loop.Loop.step")
    monkeypatch.setattr(subprocess, "run", lambda _: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match=r"SGLang 9\.8 cannot be downloaded"):
        check.folder_of("9.8", tmp_path)
    with pytest.raises(SystemExit, match="has no sglang/"):
        check.folder_of(str(tmp_path), tmp_path)
