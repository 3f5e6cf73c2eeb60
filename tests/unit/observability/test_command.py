"""`prelude dashboards`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cli.main import main


def test_it_writes_what_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["dashboards", "--out", str(tmp_path)])
    assert "7 files" in capsys.readouterr().out
    assert len(list((tmp_path / "dashboards").glob("*.json"))) == 6
    main(["dashboards", "--out", str(tmp_path), "--available", "0.99", "--runbooks", "https://wiki.example.org"])
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "rules.yaml")
    groups = yaml.safe_load((tmp_path / "rules.yaml").read_text())["groups"]
    links = [rule["annotations"]["runbook_url"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert all(link.startswith("https://wiki.example.org/") for link in links)
    main(["dashboards", "--out", str(tmp_path), "--available", "0.99", "--runbooks", "https://wiki.example.org"])
    assert "7 files" in capsys.readouterr().out


@pytest.mark.parametrize("share", ["99.9", "0", "1", "nan", "most"])
def test_it_refuses_a_share_that_is_none(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["dashboards", "--available", share])
    assert ended.value.code == 2
    assert "is not between 0 and 1, such as 0.999" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["dashboards", "--out", str(tmp_path / "file")])
    assert ended.value.code == 1
    assert "cannot be written" in capsys.readouterr().err
