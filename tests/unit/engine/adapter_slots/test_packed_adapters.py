"""A packed file's tensors reach the slots, in full on one rank and in shares on several."""

import gc
import shutil
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.adapters.serving_form import ServingForm
from support.engines.running_engine import DEVICE
from support.waiting import wait_until

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterMissing
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import MODULES, BaseModel
from adapters.packed import PACKED_NAME, kept_directory, write_for_engine
from adapters.packed.fused_layout import PARTS_OF
from cluster.local.demo import make_model
from engine.adapter_slots.packed_adapters import PackedLoader
from engine.adapter_slots.slot_places import share_of

SLOTS, MAX_RANK = 3, 16
DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> BaseModel:
    folder = tmp_path_factory.mktemp("model") / "base"
    make_model(folder)
    return BaseModel.read(folder)


def buffers_of(
    base: BaseModel, modules=tuple(PARTS_OF), num_ranks: int = 1
) -> dict[tuple[str, str, int], torch.Tensor]:
    """Shaped as in SGLang's pool: ranks share the columns of A of o_proj and down_proj, and the rows of other B."""
    buffers = {}
    for module in modules:
        size_out, size_in = base.shape_of(module)
        is_row_parallel = module in ("o_proj", "down_proj")
        shape_a = (len(PARTS_OF[module]) * MAX_RANK, size_in // num_ranks if is_row_parallel else size_in)
        shape_b = (size_out if is_row_parallel else size_out // num_ranks, MAX_RANK)
        for layer in range(base.num_layers):
            for factor, shape in (("a", shape_a), ("b", shape_b)):
                buffers[module, factor, layer] = torch.randn(SLOTS, *shape).to(DTYPE)
    return buffers


WRITERS = {
    "lora": lambda folder, base: write_random_lora(folder, base, 1, modules=MODULES, rank=MAX_RANK),
    "few modules, some layers": lambda folder, base: write_random_lora(
        folder, base, 2, modules=("k_proj", "down_proj"), rank=3, layers=(1, 3)
    ),
    "reft": lambda folder, base: write_random_reft(folder, base, 3, rank=5, layers=(0, 2)),
    "mixed": lambda folder, base: write_random_mixed(folder, base, 4),
}


@pytest.fixture(params=WRITERS)
def directory(request, base, tmp_path):
    return packed(tmp_path / "engine", base, WRITERS[request.param])


def packed(directory: Path, base: BaseModel, write=WRITERS["lora"]) -> Path:
    source = write(directory.with_name(f"source-{directory.name}"), base)
    write_for_engine(read_adapter(source, base, Limits()), base, "bfloat16", directory)
    return directory


def two_packed(folder: Path, base: BaseModel) -> Iterator[Path]:
    """folder/a and folder/b, of one layout."""
    for seed, name in enumerate("ab"):
        yield packed(
            folder / name,
            base,
            lambda source, base, seed=seed: write_random_lora(source, base, seed, modules=MODULES, rank=MAX_RANK),
        )


def expected(form: ServingForm, base: BaseModel, module: str, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A and B of an engine module, stacked from its parts; None where the adapter has none."""
    block = "self_attn" if module in ("qkv_proj", "o_proj") else "mlp"
    pairs = [form.lora.get(f"model.layers.{layer}.{block}.{part}") for part in PARTS_OF[module]]
    if None in pairs:
        assert pairs == [None] * len(pairs)
        return None
    return torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])


def assert_is_in(buffers, slot: int, form: ServingForm, base: BaseModel, share=lambda _module, a, b: (a, b)) -> None:
    """The slot has this adapter's factors, or a rank's share of them."""
    for (module, factor, layer), buffer in buffers.items():
        wanted = expected(form, base, module, layer)
        if wanted is None:
            assert not buffer[slot].any()
        else:
            own = share(module, *wanted)["ab".index(factor)]
            assert torch.equal(buffer[slot, : own.shape[0], : own.shape[1]].cpu(), own), (module, factor, layer)


def test_slots_get_what_the_file_has(base, directory):
    buffers = buffers_of(base)
    loader, form = PackedLoader(buffers, base, MAX_RANK, None), ServingForm.read(directory)
    adapter = loader.load(directory, config=None)
    loader.filler.fill(1, adapter.image)
    assert_is_in(buffers, 1, form, base)
    assert (adapter.reft is not None) == bool(form.reft)
    if adapter.reft is not None:
        assert adapter.reft.layers.tolist() == list(form.reft)
        for place, (a, b, bias) in enumerate(form.reft.values()):
            assert torch.equal(adapter.reft.a[place], a)
            assert torch.equal(adapter.reft.b[place], b.T)
            assert torch.equal(adapter.reft.bias[place], bias)
    loader.unload(adapter)


def test_loading_reads_no_tensor(tmp_path):
    """The delay of the scheduler's next batch does not grow with the adapter."""
    make_model(tmp_path / "model", hidden=512, num_layers=8)
    base = BaseModel.read(tmp_path / "model")
    path = packed(tmp_path / "engine", base) / PACKED_NAME
    loader = PackedLoader(buffers_of(base), base, MAX_RANK, None)
    adapter = loader.load(tmp_path / "engine", config=None)
    num_bytes = path.stat().st_size
    assert num_bytes > 2_000_000
    assert read_bytes(path) <= 128 * 1024
    loader.filler.fill(0, adapter.image)
    assert read_bytes(path) > num_bytes / 2
    loader.unload(adapter)


def read_bytes(path: Path) -> int:
    """Upper bound of the mapped bytes of a file that this process has read."""
    found, is_of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            is_of_file = line.endswith(str(path))
        elif is_of_file and line.startswith("Rss:"):
            found += 1024 * int(line.split()[1])
    return found


class Wrapped:
    """What SGLang's wrapper of a stacked module takes of B: a part of q, of k and of v."""

    def __init__(self, rank: int, sizes: tuple[int, ...], splits_columns: bool) -> None:
        self._rank, self._sizes, self._splits_columns = rank, sizes, splits_columns

    def slice_lora_b_weights(self, b: torch.Tensor) -> torch.Tensor:
        if self._splits_columns:
            return b
        return torch.cat([part.chunk(2)[self._rank] for part in b.split(self._sizes)])

    def slice_lora_a_weights(self, a: torch.Tensor) -> torch.Tensor:
        return a.chunk(2, dim=1)[self._rank].contiguous() if self._splits_columns else a


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_share(base, directory, rank: int):
    buffers, form = buffers_of(base, num_ranks=2), ServingForm.read(directory)
    wrapped = {
        module: Wrapped(rank, tuple(base.shape_of(p)[0] for p in parts), module in ("o_proj", "down_proj"))
        for module, parts in PARTS_OF.items()
    }
    shares = {module: share_of(own, *base.shape_of(module)) for module, own in wrapped.items()}
    loader = PackedLoader(buffers, base, MAX_RANK, shares)
    loader.filler.fill(2, loader.load(directory, config=None).image)

    def share(module: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return wrapped[module].slice_lora_a_weights(a), wrapped[module].slice_lora_b_weights(b)

    assert_is_in(buffers, 2, form, base, share)


def test_what_is_not_for_this_engine_is_refused(base, directory, tmp_path):
    def load(path: Path, base: BaseModel = base, buffers=None) -> None:
        PackedLoader(buffers or buffers_of(base), base, MAX_RANK, None).load(path, None)

    with pytest.raises(AdapterMissing, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(AdapterIncompatible, match=r"the engine runs in torch\.float32"):
        load(directory, buffers={key: buffer.float() for key, buffer in buffers_of(base).items()})
    other = replace(base, vocabulary=99)
    with pytest.raises(AdapterIncompatible, match=other.fingerprint):
        load(directory, other)
    if ServingForm.read(directory).lora:
        with pytest.raises(AdapterIncompatible, match="has no slots for it"):
            load(directory, buffers=buffers_of(base, ("o_proj",)))
    path = directory / PACKED_NAME
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(AdapterMalformed):
        load(directory)


class CudartStandIn:
    """The page-locking calls to CUDA, in order. Their effect on copies is not tested."""

    def __init__(self, error: int) -> None:
        self.calls: list[tuple[str, int]] = []
        self.may_go_on = threading.Event()
        self._error = error

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert (num_bytes > 0, flags) == (True, 0)
        assert self.may_go_on.wait(120)
        self.calls.append(("lock", address))
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unlock", address))
        return self._error


@pytest.mark.parametrize("error", [0, 2])
def test_pages_are_locked_in_order_and_loads_do_not_wait_for_it(base, tmp_path, monkeypatch, caplog, error: int):
    """Where CUDA refuses, a warning is logged and the adapter is used all the same."""
    cudart = CudartStandIn(error)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    directory, buffers = packed(tmp_path / "engine", base), buffers_of(base)
    loader = PackedLoader(buffers, base, MAX_RANK, None)
    with ThreadPoolExecutor(1) as page_locker:  # as where there is a GPU
        loader._page_locker = page_locker
        first, second = (loader.load(directory, config=None) for _ in range(2))
        loader.filler.fill(1, first.image)
        loader.unload(first)
        assert cudart.calls == []
        cudart.may_go_on.set()
    addresses = [each.mapped.data_ptr() for each in (first, second)]
    assert cudart.calls == [("lock", addresses[0]), ("lock", addresses[1]), ("unlock", addresses[0])]
    assert [record.message for record in caplog.records] == 2 * bool(error) * [
        "page-locking of an adapter failed: CUDA error 2; its copies to slots will be slow"
    ]
    assert buffers["qkv_proj", "a", 0][1].any()


def test_a_kept_file_is_mapped_and_locked_once(base, tmp_path, monkeypatch):
    """The agent writes the next adapter into the file of one that it has evicted, and deletes it in the end."""
    cudart = CudartStandIn(0)
    cudart.may_go_on.set()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    a, b = two_packed(tmp_path, base)
    form, buffers = ServingForm.read(b), buffers_of(base)
    loader = PackedLoader(buffers, base, MAX_RANK, None)
    with ThreadPoolExecutor(1) as page_locker:
        loader._page_locker = page_locker
        first = loader.load(a, config=None)
        kept = a.rename(kept_directory(a))
        loader.unload(first)
        c = kept.rename(tmp_path / "c")
        with (c / PACKED_NAME).open("r+b") as file:
            file.write((b / PACKED_NAME).read_bytes())
            file.truncate()
        second = loader.load(c, config=None)
        address = first.mapped.data_ptr()
        assert second.mapped.data_ptr() == address
        loader.filler.fill(1, second.image)
        kept = c.rename(kept_directory(c))
        loader.unload(second)
        assert_is_in(buffers, 1, form, base)
        del first, second
        gc.collect()
        assert str(kept) in Path("/proc/self/maps").read_text()
        shutil.rmtree(kept)  # the agent needs the memory for something else
        wait_until(lambda: not len(loader._kept))
    wait_until(lambda: str(kept) not in Path("/proc/self/maps").read_text())
    assert cudart.calls == [("lock", address), ("unlock", address)]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in shared memory, where agents have adapters: recent kernels lock no pages of a file on a disk."""
    with tempfile.TemporaryDirectory(prefix="prelude-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.skipif(DEVICE != "cuda", reason="it is about a GPU's driver")
def test_a_gpu_fills_slots_from_a_kept_file(base, in_memory):
    """The first adapter's slot has the first one although the second is written into its file right after."""
    directory, _ = packed_ones = list(two_packed(in_memory, base))
    contents = [(each / PACKED_NAME).read_bytes() for each in packed_ones]
    # From copies, since what is read stays mapped.
    forms = [ServingForm.read(shutil.copytree(each, in_memory / f"form-{each.name}")) for each in packed_ones]
    buffers = {key: buffer.cuda() for key, buffer in buffers_of(base).items()}
    loader = PackedLoader(buffers, base, MAX_RANK, None)
    for slot, content in enumerate(contents, 1):
        with (directory / PACKED_NAME).open("r+b") as file:
            file.write(content)
        adapter = loader.load(directory, config=None)
        torch.cuda._sleep(10**8)  # so that the copy to the slot is late
        loader.filler.fill(slot, adapter.image)
        loader.note_filled(adapter)
        kept = directory.rename(kept_directory(directory))
        loader.unload(adapter)
        directory = kept.rename(in_memory / f"next-{slot}")
    assert loader._page_locker is not None
    loader._page_locker.submit(lambda: None).result(60)
    assert adapter.mapped.is_pinned()
    for slot, form in enumerate(forms, 1):
        assert_is_in(buffers, slot, form, base)
