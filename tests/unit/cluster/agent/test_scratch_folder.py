"""An engine's sockets are in its scratch folder, and the system bounds the length of their paths."""

import socket
import tempfile
from pathlib import Path

import pytest

from cli.main import main
from cluster.agent.engine_spec import check_socket_paths
from cluster.errors import ConfigError


def test_a_folder_whose_sockets_would_have_too_long_paths_is_refused():
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        longest = 107 - len("/engine/tmp/tmp12345678")
        folder = Path(short, "x" * (longest - len(short) - 1))
        check_socket_paths("u0", folder)
        (folder / "engine/tmp").mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as longest_there_is:
            longest_there_is.bind(str(folder / "engine/tmp/tmp12345678"))
        with pytest.raises(ConfigError, match=r"u0.* 2 bytes too long .*give a shorter --scratch"):
            check_socket_paths("u0", folder.with_name(f"{folder.name}é"))


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "model: {path: /m, name: demo}\nworkers: {p0: {role: prefill}, d0: {role: decode}}\nrouter: {port: 1}\n"
    )
    long = tmp_path / ("x" * 100)
    with pytest.raises(SystemExit):
        main(["prefill-worker", "--name", "p0", "--scratch", str(long), "--config", str(path)])
    assert "too long for the engine's sockets" in capsys.readouterr().err
