"""What another SGLang release means for a hook, by small packages in place of SGLang's."""

import importlib.metadata
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.hooks import check
from engine.hooks.check import compare, find, lost_imports, shown
from engine.hooks.hook import Hook, HookKind
from engine.hooks.installation import BUILTIN

LOOP = "class Loop:\n    @print\n    def step(self, batch):\n        return len(batch.reqs)\n"
THREADS = "import threading\n\ndef start():\n    threading.Thread(target=print).start()\n"
STEP = "def step():\n    return 1\n"


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in {"sglang/__init__.py": "", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def hook_into(target: str, kind: HookKind = HookKind.AROUND) -> Hook:
    fn = SimpleNamespace(__module__="bodies", __qualname__="body")
    return Hook("it", target, fn, "", "", kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "before", "after", "status", "end_of_diff"),
    [
        ("loop.Loop.step", {"loop": LOOP}, {"loop": f"import os\n\n{LOOP}"}, "unchanged", ""),
        ("loop.Loop.step", {"loop": LOOP}, {"loop": LOOP.replace("step", "go"), "steps": LOOP}, "gone", ""),
        ("loop.Loop.step", {"loop": LOOP}, {"loop": LOOP.replace("len(", "(")}, "changed", "+        return (batch"),
        ("loop.Loop.step", {"loop": LOOP}, {"loop": LOOP.replace("    @print\n", "")}, "changed", " def step(self,"),
        # A name that a module imports.
        ("user.step", {"user": "from sglang.loop import step\n", "loop": STEP}, {"user": "", "loop": STEP}, "gone", ""),
        # A global name: its users count, in functions and in bases of classes.
        ("loop.threading", {"loop": THREADS}, {"loop": THREADS + "\ndef more():\n    pass\n"}, "unchanged", ""),
        ("loop.threading", {"loop": THREADS}, {"loop": THREADS.replace("=print", "=go")}, "changed", "=go).start()"),
        ("loop.threading", {"loop": THREADS}, {"loop": THREADS + "class A(threading.T): ...\n"}, "changed", "ing.T"),
        ("loop.threading", {"loop": THREADS}, {}, "gone", ""),
    ],
)  # fmt: skip
def test_what_became_of_a_target(tmp_path: Path, target: str, before: dict, after: dict, status: str, end_of_diff: str):
    pin, other = (
        written(tmp_path / name, {f"sglang/{module}.py": text for module, text in files.items()})
        for name, files in (("pin", before), ("other", after))
    )
    kind = HookKind.GLOBAL if target.endswith("threading") else HookKind.AROUND
    found = compare(hook_into(f"sglang.{target}", kind), pin, other)
    assert found.status == status
    assert end_of_diff in "".join(found.diff[-4:])
    assert bool(found.diff) == (status == "changed")
    assert compare(hook_into("torch.add"), pin, other).status == "in another package"


def test_imports_that_fail_in_the_other_release(tmp_path: Path):
    pin = written(tmp_path / "pin", {"sglang/a/__init__.py": "from sglang.b import *\n", "sglang/b.py": "x = y = 1\n"})
    other = written(tmp_path / "other", {"sglang/a/__init__.py": "from sglang.b import *\n", "sglang/b.py": "x = 1\n"})
    own = written(tmp_path / "own", {"engine/hooks/body.py": "def body():\n    from sglang.a import x, y, z\n"})
    assert list(lost_imports(pin, other, own)) == ["- `sglang.a.y`, in `engine/hooks/body.py`"]


def test_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name, loop in (("pin", LOOP), ("other", LOOP.replace("len", "sum"))):
        asked = f"Requires-Dist: torch=={name}\nRequires-Dist: x; extra == '{name}'\n"
        written(tmp_path / name, {"sglang/loop.py": loop, "sglang-1.dist-info/METADATA": asked})
    monkeypatch.setattr(check, "HOOKS", (hook_into("sglang.loop.Loop.step"),))
    monkeypatch.setattr(check, "SGLANG_VERSION", str(tmp_path / "pin"))
    monkeypatch.setattr(check, "lost_imports", lambda *_: ())
    assert check.main(str(tmp_path / "pin")) == 0
    assert "1 hooks: 1 unchanged." in capsys.readouterr().out
    assert check.main(str(tmp_path / "other")) == 1
    page = capsys.readouterr().out
    assert "| it | `sglang.loop.Loop.step` | changed |" in page
    assert "~~~diff\n- torch==pin\n+ torch==other\n~~~" in page
    assert "+        return sum(batch.reqs)" in page.split("\n## it\n")[1]


@pytest.mark.slow
def test_each_target_is_found_at_the_pin():
    pin = Path(str(importlib.metadata.distribution("sglang").locate_file("")))
    assert [hook.name for hook in check.HOOKS if hook.source_sha256 != BUILTIN and not shown(hook, pin)] == []


def test_a_release_is_downloaded_and_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(command: list[str]) -> SimpleNamespace:
        assert command[2:4] == ["pip", "download"]
        assert {"--no-deps", "sglang==9.9"} < set(command)
        (tmp_path / "9.9").mkdir()
        with zipfile.ZipFile(tmp_path / "9.9" / "sglang-9.9-py3-none-any.whl", "w") as wheel:
            wheel.writestr("sglang/loop.py", LOOP)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    assert find(check.folder_of("9.9", tmp_path), "sglang.loop.Loop.step")
    monkeypatch.setattr(subprocess, "run", lambda _: SimpleNamespace(returncode=1))
    with pytest.raises(SystemExit, match=r"SGLang 9\.8 cannot be downloaded"):
        check.folder_of("9.8", tmp_path)
    with pytest.raises(SystemExit, match="has no sglang/"):
        check.folder_of(str(tmp_path), tmp_path)
