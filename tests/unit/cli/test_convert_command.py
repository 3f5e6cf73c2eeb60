"""`prelude adapters convert`: from an adapter for all positions to a revision that says where it comes from."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.commands import Prelude
from support.training.small_runs import write_jsonl
from support.training.steerable import Steerable, make_steerable, steerable_rows

from adapters.formats import read_adapter
from adapters.model.base_model import BaseModel
from adapters.verification.reference import UNLIMITED

pytestmark = pytest.mark.slow

QUICK = ("--rank", "8", "--learning-rate", "0.01", "--answer-tokens", "6", "--device", "cpu")
ENOUGH, TOO_FEW = ("--steps", "40"), ("--steps", "1")


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Steerable:
    return make_steerable(tmp_path_factory.mktemp("steerable"))


@pytest.fixture
def adapters(capsys: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capsys, ("adapters",))


def files(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_from_the_catalog_to_a_revision_with_its_lineage(toy: Steerable, tmp_path: Path, adapters: Prelude):
    config, output = tmp_path / "cluster.yaml", tmp_path / "converted"
    config.write_text(f"model: {{path: {toy.model}, name: toy, dtype: float32}}\nworkers: {{u: {{role: unified}}}}\n")
    teacher = adapters.json("import", "teacher", toy.teacher, "--config", config)["revision"]
    convert = ("convert", "teacher@latest", "--config", config, "--data", toy.without_answers, "--output", output)
    status, told, progress = adapters(*convert, *QUICK, *ENOUGH)
    assert status == 0, progress
    assert "step 40 of 40: divergence" in progress
    report = json.loads((output / "conversion.json").read_text())
    assert report["teacher"] == teacher
    assert report["after"]["agreement"] >= 0.8 > report["before"]["agreement"]
    assert report["after"]["exact_match"] is None  # the rows have no answers
    lines = told.splitlines()
    agreements = (report["before"]["agreement"], report["after"]["agreement"])
    assert [float(each) for each in lines[1].split()[-2:]] == pytest.approx(agreements, abs=1e-4)
    assert lines[-1] == f"Next: prelude adapters import NAME {output}"
    lineage = (
        f"lineage: converted from {teacher} for the prompt only, agreement {report['after']['agreement']:.3f}, data "
        f"sha256:{report['data']}"
    )
    assert lineage in adapters.prints("import", "converted", output, "--config", config)
    told = adapters.prints("show", "converted", "--config", config)
    assert lineage in told
    assert " prefill " in told


def test_what_agrees_too_rarely_is_not_written(toy: Steerable, tmp_path: Path, adapters: Prelude):
    convert = ("convert", toy.teacher, "--model", toy.model, "--data", toy.rows, *QUICK, *TOO_FEW)
    said = "agreement_too_low: 0.000 of the held-out answers are the teacher's, --min-agreement is 0.8"
    told = adapters.refuses(*convert, "--output", tmp_path / "refused", says=said)
    assert "the rows' own answer (teacher 0.8" in told
    assert files(tmp_path / "refused") == {"conversion.json"}
    few = write_jsonl(tmp_path / "few.jsonl", steerable_rows()[:5])
    document = adapters.json(*convert, "--eval-data", few, "--output", tmp_path / "json", status=1)
    assert (document["error"]["code"], document["after"]["agreement"]) == ("agreement_too_low", 0)
    assert (document["num_prompts"], document["num_held_out"]) == (139, 5)
    output = tmp_path / "converted"
    assert adapters.json(*convert, "--min-agreement", "0", "--output", output)["num_held_out"] == 29
    assert files(output) == {"conversion.json", "adapter_config.json", "adapter_model.safetensors"}
    converted = read_adapter(output, BaseModel.read(toy.model), UNLIMITED)
    assert (converted.kinds, converted.positions, converted.max_rank) == (("lora",), "prefill", 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": None}, "name the base model with --model, or a cluster.yaml with --config"),
        ({"SOURCE": "acme/legal"}, "acme/legal is no directory; with --config, SOURCE may be a reference"),
        ({"--min-agreement": "1.5"}, "--min-agreement is 1.5; it is a share, from 0 to 1"),
        ({"--output": "."}, "--output: . exists; name a new folder"),
        ({"--output": "none/out"}, "none is no folder; create it first"),
        ({"--steps": "0"}, "steps is 0; it must be at least 1"),
        ({"--answer-tokens": "5000"}, "Choose fewer --answer-tokens, or leave the row out"),
        ({"--data": "none.jsonl"}, "none.jsonl cannot be read (No such file or directory); name a JSONL file"),
        ({"--config": "none.yaml", "SOURCE": "acme/legal"}, "none.yaml"),
        ({"--device": "cuda:9"}, "the device is 'cuda:9', which cannot be used here"),
    ],
)
def test_wrong_usage(
    toy: Steerable,
    tmp_path: Path,
    adapters: Prelude,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    options = {"SOURCE": toy.teacher, "--model": toy.model, "--data": toy.rows, "--output": "out", "--device": "cpu"}
    options |= change
    source = options.pop("SOURCE")
    flags = [each for name, value in options.items() if value is not None for each in (name, value)]
    assert adapters.refuses("convert", source, *flags, says=message, status=2) == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("", "there is no row to train on"),
        ('{"prompt": ""}\n{"text": "a"}\n[1]\n{"prompt": 3}\n', "4 of 4 rows cannot be trained on"),
        ('{"prompt": "sea"}\n' * 100, "0 different prompts to learn from, 1 held out; give a few hundred"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}\n', "half a surrogate pair"),
    ],
)
def test_hostile_data(toy: Steerable, tmp_path: Path, adapters: Prelude, rows: str, message: str):
    data = tmp_path / "rows.jsonl"
    data.write_text(rows)
    convert = ("convert", toy.teacher, "--model", toy.model, "--data", data, *QUICK, *TOO_FEW)
    assert adapters.refuses(*convert, "--output", tmp_path / "out", says=message) == ""
    assert not (tmp_path / "out").exists()
