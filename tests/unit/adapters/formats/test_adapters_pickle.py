import pickle
from types import SimpleNamespace

import pytest
import torch
from support.adapters.random_adapters import write_random_lora

from adapters.errors import AdapterMalformed, AdapterTooLarge, AdapterUnsupported
from adapters.formats import Limits, read_adapter
from adapters.formats.pickle_conversion import convert_pickle
from adapters.model.manifest import revision_id_of


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.fixture
def pickled(base, tmp_path):
    from safetensors.torch import load_file

    directory = write_random_lora(tmp_path / "lora", base, seed=1, dtype="bfloat16")
    weights = directory / "adapter_model.safetensors"
    expected = read_adapter(directory, base, Limits())
    torch.save(load_file(weights), directory / "adapter_model.bin")
    weights.unlink()
    return SimpleNamespace(directory=directory, revision_id=revision_id_of(expected))


def test_a_pickled_lora_is_the_same_revision(pickled, base, limits, tmp_path):
    with pytest.raises(AdapterUnsupported, match="--allow-pickle"):
        read_adapter(pickled.directory, base, limits)
    out = convert_pickle(pickled.directory, tmp_path / "new" / "out")
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert revision_id_of(read_adapter(out, base, limits)) == pickled.revision_id
    with pytest.raises(FileExistsError):
        convert_pickle(pickled.directory, out)


@pytest.mark.parametrize("name", ["adapter_model.bin", "intkey_x.bin"])
@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", AdapterMalformed),
        (b"garbage", AdapterMalformed),
        (pickle.dumps(Evil()), AdapterMalformed),
        (pickle.dumps([1, 2]), AdapterMalformed),
        (b"PK\x03\x04" + b"\0" * 50, AdapterMalformed),
    ],
)
def test_pickles_that_are_refused(name, content, error, tmp_path, capsys):
    directory = tmp_path / "in"
    directory.mkdir()
    (directory / name).write_bytes(content)
    (directory / ("adapter_config.json" if name.startswith("adapter") else "config.json")).write_text("{}")
    with pytest.raises(error):
        convert_pickle(directory, tmp_path / "out")
    assert "code ran" not in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ({"x": [1.0]}, AdapterMalformed, "a name with a tensor"),
        ({3: torch.ones(1)}, AdapterMalformed, "a name with a tensor"),
        ({"x": torch.ones(2, dtype=torch.float64)}, AdapterUnsupported, "float64"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, AdapterUnsupported, "complex"),
        ({"x": torch.eye(2).to_sparse()}, AdapterUnsupported, "sparse"),
        ({"x": torch.ones(1).expand(1 << 40)}, AdapterTooLarge, "bytes"),
        ({"x": torch.ones(9, 9).t()[:, ::2]}, None, ""),
    ],
)
def test_what_a_pickle_may_hold(value, error, says, tmp_path):
    (tmp_path / "in").mkdir()
    torch.save(value, tmp_path / "in" / "adapter_model.bin")
    (tmp_path / "in" / "adapter_config.json").write_text("{}")
    if error is None:
        from safetensors.torch import load_file

        out = convert_pickle(tmp_path / "in", tmp_path / "out")
        assert torch.equal(load_file(out / "adapter_model.safetensors")["x"], value["x"])
        return
    with pytest.raises(error, match=says):
        convert_pickle(tmp_path / "in", tmp_path / "out")


def test_nothing_to_convert_and_too_much(pickled, tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(AdapterUnsupported, match="neither a pyreft directory nor a PEFT one"):
        convert_pickle(tmp_path / "in", tmp_path / "out")
    with pytest.raises(AdapterTooLarge):
        convert_pickle(pickled.directory, tmp_path / "out", Limits(max_bytes=100))
