"""Whatever is wrong with an adapter, the error says so; and nothing that is wrong goes through."""

import json
import os
import shutil

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support.adapters.damaged_adapters import DAMAGES, assert_named
from support.adapters.random_adapters import write_random_lora, write_random_mixed
from support.descriptors import no_descriptors

from adapters.errors import (
    AdapterError,
    AdapterIncompatible,
    AdapterMalformed,
    AdapterMissing,
    AdapterTooLarge,
    AdapterUnsupported,
    HostExhausted,
)
from adapters.formats import Limits, read_adapter
from adapters.model.manifest import revision_id_of

MODULES = ("q_proj", "v_proj")


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_named(name, base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=0, modules=MODULES)
    assert_named(DAMAGES[name], directory, base, limits)


def test_what_this_host_lacks_is_no_damage(base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=0, modules=MODULES)
    read_adapter(directory, base, limits)  # so that every module is imported
    with no_descriptors(), pytest.raises(HostExhausted, match="Too many open files") as caught:
        read_adapter(directory, base, limits)
    assert (caught.value.http_status, caught.value.retryable) == (503, True)
    read_adapter(directory, base, limits)


def test_a_pipe_in_place_of_a_file_does_not_block(base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=0)
    (directory / "added_tokens.json").unlink(missing_ok=True)
    os.mkfifo(directory / "added_tokens.json")
    read_adapter(directory, base, limits)  # not a regular file, so it is not there


def test_an_adapter_for_another_model(base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=0, modules=MODULES)
    for other, says in (
        ({"hidden": 64}, "it was made for another model"),
        ({"head_dim": 16}, "it was made for another model"),
        ({"num_layers": 2}, "layers 0 to 1"),
    ):
        changed = base.__class__(**{f: getattr(base, f) for f in base.__dataclass_fields__} | other)
        with pytest.raises(AdapterIncompatible, match=says):
            read_adapter(directory, changed, limits)


def test_limits(base, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=0, modules=MODULES, rank=8)
    with pytest.raises(AdapterIncompatible, match="rank 8, over this deployment's limit of 7"):
        read_adapter(directory, base, Limits(max_rank=7))
    with pytest.raises(AdapterIncompatible, match="changes v_proj, but this deployment adapts q_proj, k_proj"):
        read_adapter(directory, base, Limits(target_modules=("q_proj", "k_proj")))
    with pytest.raises(AdapterTooLarge, match="at most 1000"):
        read_adapter(directory, base, Limits(max_bytes=1000))


def test_the_directory_itself(base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=0)
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(AdapterUnsupported, match="is a symbolic link"):
        read_adapter(tmp_path / "link", base, limits)
    with pytest.raises(AdapterMissing, match="not a directory"):
        read_adapter(directory / "adapter_config.json", base, limits)
    with pytest.raises(AdapterMissing, match="must exist"):
        read_adapter(tmp_path / "nul\0byte", base, limits)
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterMalformed, match="is no adapter"):
        read_adapter(tmp_path / "empty", base, limits)
    (tmp_path / "empty" / "intkey_layer_1_comp_block_output_unit_pos_nunit_1#0.bin").touch()
    with pytest.raises(AdapterUnsupported, match=r"is pyreft's.*in Prelude's own layout"):
        read_adapter(tmp_path / "empty", base, limits)
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "linked").symlink_to(tmp_path)
    read_adapter(tmp_path / "parent" / "linked" / "lora", base, limits)  # a link further up is the operator's business


def test_a_directory_of_two_formats(base, limits, tmp_path):
    directory = write_random_lora(tmp_path / "lora", base, seed=0)
    (directory / "prelude_adapter.json").write_text("{}")
    with pytest.raises(AdapterMalformed, match=r"adapter_config.json and prelude_adapter.json"):
        read_adapter(directory, base, limits)


def test_what_else_may_lie_in_the_directory(base, limits, tmp_path):
    """Trainers leave checkpoints, optimizer states and tokenizers behind. They are not the adapter."""
    directory = write_random_lora(tmp_path / "lora", base, seed=0)
    expected = revision_id_of(read_adapter(directory, base, limits))
    (directory / "checkpoint-100").mkdir()
    for name in ("optimizer.pt", "training_args.bin", "README.md", "tokenizer.json", "config.json"):
        (directory / name).write_bytes(b"?")
    (directory / "added_tokens.json").write_text('{"<pad>": 149}')  # already in the vocabulary of 150
    assert revision_id_of(read_adapter(directory, base, limits)) == expected


CONFIG_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["q_proj", "all-linear", ".*_proj", "(", "LORA", "layers", "none", "a*" * 50, "(.*)*x"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["q_proj", ".*", "("]), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip
FIELDS = [
    "r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layers_pattern", "use_rslora", "bias", "peft_type", "modules_to_save", "init_lora_weights", "use_dora", "prelude",
]  # fmt: skip


WRITERS = {
    "adapter_config.json": lambda path, base: write_random_lora(path, base, 0, modules=MODULES, rank=2),
    "prelude_adapter.json": lambda path, base: write_random_mixed(path, base, 0, rank=2),
}


def places(value, path=()):
    """Every place in a JSON value, as keys from the top."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


@pytest.mark.parametrize("file", WRITERS)
@settings(max_examples=150)
@given(data=st.data())
def test_no_value_anywhere_in_a_configuration_crashes(file, base, limits, tmp_path, data):
    directory = tmp_path / "adapter"
    if not directory.exists():
        WRITERS[file](directory, base)
        shutil.copy(directory / file, tmp_path / file)
        read_adapter(directory, base, limits)
    whole = json.loads((tmp_path / file).read_text())
    if file == "adapter_config.json":
        whole = dict.fromkeys(FIELDS) | whole
    *path, last = data.draw(st.sampled_from(places(whole)[1:]))
    part = whole
    for key in path:
        part = part[key]
    part[last] = data.draw(CONFIG_VALUES)
    (directory / file).write_text(json.dumps(whole))
    try:
        adapter = read_adapter(directory, base, limits)
    except AdapterError as error:
        assert str(error)  # noqa: PT017
        return
    # Accepted means: every tensor of the file is in the adapter.
    assert len(adapter.lora) == base.num_layers * len(MODULES)
