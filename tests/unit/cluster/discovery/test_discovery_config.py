"""`discovery` of cluster.yaml: what is valid, what is refused, and the settings of a worker that no file lists."""

from pathlib import Path

import pytest

from cli.main import main
from cluster.config.discovery import split_nameserver
from cluster.config.load import dump_cluster_config, load_cluster_config
from cluster.config.schema import ClusterConfig
from cluster.discovery.configured import configured_sources
from cluster.errors import ConfigError
from cluster.local.found_worker import with_found_worker

MODEL = "model: {path: model, name: demo}\n"
BOTH = (
    "discovery:\n"
    "  prefill: {dns: prefill.example.org, control_port: 9000, worker: {bootstrap_port: 9003, domain: rack-1}}\n"
    "  decode: {dns: decode.example.org., control_port: 9100, worker: {drain_timeout_s: 90}}\n"
)


def load(folder: Path, text: str) -> ClusterConfig:
    path = folder / "cluster.yaml"
    path.write_text(MODEL + text)
    return load_cluster_config(path)


def test_workers_may_all_be_found(tmp_path: Path):
    config = load(tmp_path, BOTH + "  nameservers: [127.0.0.1:5353, '::1', '[fd00::1]:54']\n  interval_s: 0.5\n")
    assert config.workers == {}
    assert {(source.label, *source.roles) for source in configured_sources(config.discovery)} == {
        ("DNS name prefill.example.org", "prefill"),
        ("DNS name decode.example.org.", "decode"),
    }
    assert [source.roles for source in configured_sources(config.discovery, ["decode"])] == [{"decode"}]
    assert [split_nameserver(each) for each in config.discovery.nameservers] == [
        ("127.0.0.1", 5353),
        ("::1", 53),
        ("fd00::1", 54),
    ]
    dump_cluster_config(config, tmp_path / "again.yaml")
    assert load_cluster_config(tmp_path / "again.yaml") == config


def test_a_pair_may_be_half_listed_and_half_found(tmp_path: Path):
    found = "discovery: {decode: {dns: decode, control_port: 1}}\n"
    assert load(tmp_path, "workers: {p: {role: prefill}}\n" + found).workers.keys() == {"p"}
    with pytest.raises(ConfigError, match="there is no prefill worker for the decode workers"):
        load(tmp_path, found)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("discovery: {unified: {control_port: 5}}\n", "discovery.unified.dns: Field required"),
        ("discovery: {unified: {kubernetes: {service: u}}}\n", "set `dns` to the name of a headless Service"),
        ("", "workers: give at least one, or `discovery` to find them"),
        ("discovery: {unified: {dns: u}}\n", "discovery.unified.control_port: Field required"),
        ("discovery: {unified: {dns: _c._tcp.u, control_port: 5}}\n", "expected a DNS name with A or AAAA records"),
        ("discovery: {unified: {dns: u, control_port: 0}}\n", "discovery.unified.control_port"),
        ("discovery: {unified: {dns: '', control_port: 5}}\n", "expected a DNS name"),
        (f"discovery: {{unified: {{dns: {'a.' * 130}a, control_port: 5}}}}\n", "expected a DNS name"),
        ("discovery: {unified: {dns: u, control_port: 5}, interval_s: 0}\n", "discovery.interval_s"),
        ("discovery: {unified: {dns: u, control_port: 5}, nameservers: [dns.local]}\n", "expected an IP address"),
        ("discovery: {unified: {dns: u, control_port: 5}, nameservers: ['10.0.0.1:0']}\n", "0 is no port"),
        ("discovery: {unified: {dns: u, control_port: 5, worker: {role: decode}}}\n", "worker.role"),
    ],
)
def test_refusals(tmp_path: Path, text: str, says: str):
    with pytest.raises(ConfigError, match=r"cluster.yaml:\d+: ") as refused:
        load(tmp_path, text)
    assert says in str(refused.value)


def test_a_worker_that_no_file_lists(tmp_path: Path):
    config = load(tmp_path, BOTH)
    prefill = with_found_worker(config, "prefill-7f9c-x", "prefill", "127.0.0.1")
    worker = prefill.workers["prefill-7f9c-x"]
    assert (worker.role, worker.host, worker.domain) == ("prefill", "127.0.0.1", "rack-1")
    assert (worker.control_port, worker.bootstrap_port) == (9000, 9003)
    assert len({0, worker.engine_port, worker.metrics_port}) == 3
    assert prefill.drain_timeout_of("prefill-7f9c-x") == 30
    decode = with_found_worker(config, "d-1", "decode", "127.0.0.1")
    assert decode.workers["d-1"].control_port == 9100
    assert decode.drain_timeout_of("d-1") == 90
    assert config.drain_timeout_of("of either role") == 90
    assert config.workers == {}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prefill-worker", "--name", "p"], "--host: p is not among `workers`; give the address of this host"),
        (["prefill-worker", "--name", "p", "--host", "0.0.0.0"], "(found 0.0.0.0)"),
        (["prefill-worker", "--name", "a/b", "--host", "127.0.0.1"], "--name: 'a/b' has other characters"),
        (["prefill-worker", "--name", "p", "--host", "203.0.113.1"], "--host: no port can be opened at 203.0.113.1"),
        (["unified-worker", "--name", "u"], "there is no unified worker called 'u'; there is none, and discovery.uni"),
    ],
)
def test_what_its_process_refuses(tmp_path: Path, capsys, words: list[str], says: str):
    load(tmp_path, BOTH)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--config", str(tmp_path / "cluster.yaml")])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_listed_worker_takes_its_address_from_the_file(tmp_path: Path, capsys):
    load(tmp_path, "workers: {u: {role: unified}}\n")
    with pytest.raises(SystemExit):
        main(["unified-worker", "--name", "u", "--host", "h", "--config", str(tmp_path / "cluster.yaml")])
    assert "--host: workers.u of " in capsys.readouterr().err
