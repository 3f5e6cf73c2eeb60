"""What a matrix runs, from its command line on: cells, editions, order, mistakes."""

import argparse

import pytest
from support.commands import Prelude

from bench.errors import BenchError
from bench.matrix import options, plan
from bench.matrix.run import adapters_of
from bench.workloads.catalog import WORKLOADS
from bench.workloads.workload import Stream
from cli.bench import matrix as command
from cli.main import _parser


def parsed(*words: str) -> argparse.Namespace:
    return _parser().parse_args(["bench", "matrix", *words])


def options_of(*words: str) -> options.Options:
    return command.options_of(parsed(*words))


def test_matrices_and_workloads_have_one_name_space():
    assert not set(plan.MATRICES) & set(WORKLOADS)


def test_a_cpu_has_an_edition_of_its_own():
    found, on_gpu = options_of(), options_of("--device", "cuda")
    assert (found.duration_s, found.cells[0].lengths.prompt) == (4.0, 32)
    assert (on_gpu.duration_s, on_gpu.cells[0].lengths.prompt) == (60.0, 256)
    assert on_gpu.slo_ms == {"ttft": 500.0, "tpot": 50.0}


def test_every_published_workload_has_a_small_edition():
    cells = options_of("published").cells
    assert [cell.name for cell in cells] == list(WORKLOADS)
    for cell in cells:
        whole = WORKLOADS[cell.name]
        assert 1 <= cell.num_adapters <= 128
        assert (cell.concurrency is None) == (whole.concurrency is None)
        sizes = []
        for workload in (cell, whole):
            requests = [each for n in range(40) for each in Stream(workload, 1, cell.num_adapters).session(n).requests]
            sizes.append(sum(each.max_tokens + (each.prompt_tokens or 0) for each in requests))
        assert sizes[0] < sizes[1] / 4, cell.label


def test_the_command_line_changes_cells():
    found = options_of("punica", "pioneer", "--adapters", "3,5", "--concurrency", "7", "--scale", "1")
    assert [cell.label for cell in found.cells] == [
        "punica, n = 3", "punica, n = 5", "pioneer, n = 3", "pioneer, n = 5",
    ]  # fmt: skip
    assert {cell.concurrency for cell in found.cells} == {7}
    assert found.cells[2].lengths == WORKLOADS["pioneer"].lengths
    assert found.systems == ("none", "stock", "unified", "pair")
    chat = options_of("chat", "--concurrency", "7").cells[0]  # of its own it is an open loop
    assert (chat.concurrency, chat.requests_per_s) == (7, None)


def test_popularity_of_the_adapters_is_that_of_the_command_line():
    (cell,) = options_of("punica", "--lora-request-distribution", "distinct", "--adapters", "1000").cells
    assert (cell.label, cell.popularity.distribution) == ("punica distinct, n = 1000", "distinct")
    (cell,) = options_of("pioneer", "--lora-request-distribution", "skewed", "--adapters", "4").cells
    assert (cell.label, cell.popularity.alpha) == ("pioneer skewed, n = 4", 1.5)


def test_adapters_have_the_rank_of_the_workloads_source():
    assert options_of("databricks-prefill", "databricks-decode").lora_rank == 32
    assert options_of("published").lora_rank == options_of("punica").lora_rank == 16
    assert options_of("databricks-decode", "--lora-rank", "8").lora_rank == 8


def test_adapters_may_act_at_all_positions_in_shares_of_a_cell():
    found = options_of("pioneer", "--adapters", "4", "--all-shares", "0,0.25,0.5,1", "--systems", "none,stock,unified")
    assert [cell.label for cell in found.cells] == [
        "pioneer, n = 4", "pioneer all 0.25, n = 4", "pioneer all 0.5, n = 4", "pioneer all 1, n = 4",
    ]  # fmt: skip
    names = tuple(f"{positions}{number}" for positions in ("prompt", "all") for number in range(4))
    shares = [adapters_of(cell, names, found.max_adapters) for cell in found.cells]
    assert shares == [
        ("prompt0", "prompt1", "prompt2", "prompt3"), ("prompt0", "prompt1", "prompt2", "all3"),
        ("prompt0", "all1", "prompt2", "all3"), ("all0", "all1", "all2", "all3"),
    ]  # fmt: skip
    # Stock SGLang's always do, so it has no others.
    assert [adapters_of(cell, names[:4], found.max_adapters) for cell in found.cells] == [names[:4]] * 4


def test_cold_adapters_are_loaded_by_clusters_with_little_memory():
    found = options_of("cold")
    assert (found.through, found.host_adapters, found.num_slots) == ("router", 28, 16)
    assert [cell.num_adapters for cell in found.cells] == [12, 24, 64]
    assert all(cell.warm_up >= found.max_adapters for cell in found.cells)
    found.check()
    assert (options_of().through, options_of().host_adapters) == ("engines", None)
    assert options_of("pioneer", "--host-adapters", "4").through == "router"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--gpus", "2"), "--gpus 2: --device cpu has none"),
        (("--device", "cuda", "--gpus", "3", "--systems", "pair"), "pair have two engines each; give an even number"),
        (("--tensor-parallel", "2"), "--tensor-parallel 2: --gpus 1 is no multiple of it"),
        (("cold", "--through", "engines"), "--host-adapters 28: engines alone keep all"),
        (("pioneer", "--all-shares", "1"), "--all-shares: pair are measured with adapters for the prompt only"),
        (("pioneer", "--adapters", "2", "--all-shares", "0.25"), "--all-shares 0.25: of 2 adapters that is 0.5"),
        (
            ("--engine-arguments=--load-format dummy", "--systems", "none,stock"),
            "stock SGLang loads no adapters beside",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_first(words: tuple[str, ...], says: str):
    with pytest.raises(BenchError, match=says):
        options_of(*words).check()


def test_mistakes_are_named(prelude: Prelude):
    prelude.refuses("bench", "matrix", "fast", says="there is no matrix or workload 'fast'", status=2)
    with pytest.raises(SystemExit):
        parsed("--systems", "none,fast")
