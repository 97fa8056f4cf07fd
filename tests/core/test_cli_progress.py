import pytest

from rackmount.cli.progress import progress


def test_bars_are_drawn_for_each_stage_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress() as report:
        report("download", 5, None)
        report("load", 1, 4)
        report("load", 4, 4)
    captured = capsys.readouterr()
    assert "download" in captured.err and "load" in captured.err and "100%" in captured.err
    assert captured.out == ""


def test_nothing_is_drawn_where_stderr_is_no_terminal(monkeypatch, capsys):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    with progress() as report:
        report("load", 1, 4)
    assert capsys.readouterr() == ("", "")


def test_what_fails_inside_passes_through():
    with pytest.raises(ValueError, match="truncated"), progress():
        raise ValueError("truncated")
