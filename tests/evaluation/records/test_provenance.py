"""Which code made a run."""

import subprocess

from evaluation.records import provenance


def test_only_files_other_than_records_make_the_code_modified(monkeypatch, tmp_path):
    def git(*words):
        who = ("-c", "user.name=x", "-c", "user.email=x@y")
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert provenance.git_state() == {}, "no checkout"
    (tmp_path / "results").mkdir()
    for name in ("code.py", "results/record"):
        (tmp_path / name).write_text("")
    git("init"), git("add", "."), git("commit", "-m", "x")
    states = [provenance.git_state()]
    for name in ("results/record", "code.py"):
        (tmp_path / name).write_text("changed")
        states.append(provenance.git_state())
    assert [state["modified"] for state in states] == [False, False, True]
    assert {state["commit"] for state in states} == {git("rev-parse", "HEAD").strip()}
