"""The audit: made-up records by hand, and the logit gap on a real model against a plain forward."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import audit
from evaluation.loading.bench import answer_text, prompt_ids
from evaluation.records.runs import read_runs
from evaluation.statistics.agreement import GAPS, audit_table, audits, read_gaps, wording
from evaluation.statistics.experiment import Experiment
from evaluation.statistics.pools import pools
from evaluation.statistics.rendering import write_audit
from tests.evaluation.made_runs import answer, asked, made, write


def said(question_id, *turns):
    """A question whose turns' tokens are these."""
    return answer(
        question_id,
        "qa",
        [([1] * len(ids), 1.0) for ids in turns],
        output_ids=[list(ids) for ids in turns],
    )


VANILLA = made(
    "vanilla", [said(1, [1, 2, 3], [4, 5]), said(2, [6, 7, 8]), said(3, [9]), said(4, [5])]
)
OTHER = made(
    "pld",
    [said(1, [1, 2, 9], [4, 4]), said(2, [6, 7, 8]), said(3, [9, 9]), said(4, [])],
    folder="other",
)


def test_turn_by_turn_by_hand(tmp_path):
    (audited,) = audits(pools([VANILLA, OTHER]))
    # question 1 parts in its first turn, so its second says nothing; 3 goes on where vanilla has ended, 4 ends at once
    assert (len(audited.turns), audited.identical, audited.tokens, audited.left_out) == (4, 1, 8, 1)
    assert [(p.question_id, p.turn, p.differs_at) for p in audited.different] == [
        (1, 0, 2),
        (3, 0, 1),
        (4, 0, 0),
    ]
    row = audit_table(audits(pools([VANILLA, OTHER])), {("other", "1", "0", "0", "2"): 0.25}).iloc[
        0
    ]
    assert row["identical_share"] == 1 / 4 and row["first_difference_question"] == 1
    assert row["gaps_known"] == 1 and row["largest_logit_gap"] == 0.25


def test_the_audit_of_servers_reads_no_answers_of_other_runs(tmp_path, capsys):
    folder = write(VANILLA, tmp_path)
    (folder / "answers.jsonl").unlink()  # of which reading it would speak
    (folder / "summary.json").write_text("{}")
    audit.audit_served(tmp_path, {})
    assert not capsys.readouterr().err


def test_what_holds_no_token_ids_is_not_passed(tmp_path):
    """A turn without its entry had been dropped in silence, and two empty ones had been equal."""
    lacking, empty = said(1, [1, 2]), said(2, [])
    lacking["choices"][0]["turns"] = ["text"] * 2
    whole, short = said(3, [1], [2]), said(3, [1])
    runs = [
        made("vanilla", [said(1, [1, 2], [3]), empty, whole]),
        made("pld", [lacking, empty, short, said(4, [1])]),
    ]
    (line,) = wording(audit_table(audits(pools(runs)), {}), tmp_path)
    assert line.startswith("Lossless in float32: all 2 turns equal") and line.endswith(
        "; 4 turns are not compared."
    )


def test_the_words_of_each_type(tmp_path):
    same = made("pld", VANILLA.answers)
    said = "Lossless in float32: all 5 turns equal vanilla's, token for token (1 configuration, 10 tokens)."
    assert wording(audit_table(audits(pools([VANILLA, same])), {}), tmp_path) == [said]
    half = [
        made(r.label, r.answers, model={"dtype": "float16"}, folder=str(r.folder))
        for r in (VANILLA, OTHER)
    ]
    lines = wording(audit_table(audits(pools([VANILLA, same, *half])), {}), tmp_path)
    assert (
        lines[1].startswith("Not identical in float16: 1 of 4 turns")
        and f"python -m evaluation.audit {tmp_path}" in lines[1]
    )
    gaps = {("other", "1", "0", "0", "2"): 0.25, ("other", "3", "0", "0", "1"): 0.125}
    gaps |= {("other", "4", "0", "0", "0"): 0.0}
    measured = wording(audit_table(audits(pools([VANILLA, same, *half])), gaps), tmp_path)[1]
    assert "two largest logits are at most 0.25 apart" in measured
    (wrong,) = wording(audit_table(audits(pools([VANILLA, OTHER])), gaps), tmp_path)
    assert "in float32: 1 of 4 turns" in wrong and "Lossless" not in wrong, (
        "a difference is not lossless"
    )


def test_without_vanilla_there_is_no_audit(tmp_path, call):
    assert (
        write_audit(Experiment([OTHER]), tmp_path / "tables") == []
        and not (tmp_path / "tables").exists()
    )
    assert "no runs here" in call(audit.main, tmp_path).err


def test_the_gap_is_the_targets_own(evaluate, call, checkpoint, tmp_path):
    assert evaluate("-m", "method=vanilla,recycling", "name=a", "max_new_tokens=8").code == 0
    folder = tmp_path / "results/a"
    assert "Lossless in float32" in (folder / "tables/audit.md").read_text()
    run = next(r for r in read_runs(folder) if r.label != "vanilla")
    rows = [json.loads(line) for line in (run.folder / "answers.jsonl").open()]
    # defects in the second turn of the first question, the first of the second
    places = {
        "10": (0, 1),
        "11": (1, 0),
    }
    for row, turn in places.values():
        ids = rows[row]["choices"][0]["output_ids"][turn]
        ids[3] = (ids[3] + 1) % 300
        # as in compact records
        rows[row]["choices"][0]["turns"] = [""] * len(rows[row]["choices"][0]["turns"])
    (run.folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = call(audit.main, folder)
    assert outcome.code == 0, outcome.err
    entries = {entry["at"][1]: entry for entry in json.loads((folder / GAPS).read_text())}
    assert entries.keys() == places.keys() and len(read_gaps(folder)) == 2
    questions = Path(run.metadata["config"]["bench"]["path"]).read_text().splitlines()
    tokenizer, model = (
        AutoTokenizer.from_pretrained(checkpoint),
        AutoModelForCausalLM.from_pretrained(checkpoint).eval(),
    )
    for question_id, (row, turn) in places.items():
        *before, ids = rows[row]["choices"][0]["output_ids"][: turn + 1]
        answers = [answer_text("vicuna_v1.1", tokenizer, tokens) for tokens in before]
        assert all(answers)
        prompt = prompt_ids(
            "vicuna_v1.1", tokenizer, json.loads(questions[row])["turns"][: turn + 1], answers
        )
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids[:3]])).logits[0, -1]
        best = logits.sort(descending=True).values
        assert entries[question_id]["gap"] == pytest.approx(float(best[0] - best[1]), abs=1e-4)
        assert entries[question_id]["picked"] == pytest.approx(
            float(best[0] - logits[ids[3]]), abs=1e-4
        )
    assert f"at most {max(entry['gap'] for entry in entries.values()):.3g} apart" in outcome.out


@pytest.fixture
def foreign(evaluate, tmp_path):
    """A folder of somebody else's with a parting in it, whose metadata can be changed."""
    assert (
        evaluate("-m", "method=vanilla,pld", "name=f", "max_new_tokens=6", "bench.end=1").code == 0
    )
    folder = tmp_path / "results/f"
    run = next(r for r in read_runs(folder) if r.label != "vanilla")
    (row,) = [json.loads(line) for line in (run.folder / "answers.jsonl").open()]
    row["choices"][0]["output_ids"][0][2] = 3
    (run.folder / "answers.jsonl").write_text(json.dumps(row) + "\n")

    def changed(part, **settings):
        for path in folder.glob("runs/*/metadata.json"):
            metadata = json.loads(path.read_text())
            metadata["config"][part] |= settings
            path.write_text(json.dumps(metadata))
        return folder

    return changed


@pytest.mark.parametrize("key", ["trust_remote_code", "allow_pickle"])
def test_a_folders_metadata_permit_nothing(foreign, call, monkeypatch, key):
    """The folder of somebody else's had said that its model's code is trusted, and it was run."""
    loaded = []
    load = audit.load_model
    monkeypatch.setattr(
        audit, "load_model", lambda settings: loaded.append(settings) or load(settings)
    )
    folder, flag = foreign("model", **{key: True}), f"--{key.replace('_', '-')}"
    outcome = call(audit.main, folder)
    assert outcome.code == 2 and not loaded and not (folder / GAPS).exists()
    (line,) = outcome.err.strip().splitlines()
    assert f"model.{key}=true" in line and line.endswith(flag)
    outcome = call(audit.main, folder, flag)
    assert outcome.code == 0, outcome.err
    assert [getattr(settings, key) for settings in loaded] == [True]


def test_a_folders_metadata_fetch_nothing(foreign, call, monkeypatch):
    """A bench of its own URL had been fetched to a place in this repository that it named."""
    requests = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: requests.append(a))
    folder = foreign(
        "bench", path="data/nowhere/question.jsonl", url="https://example.org/x", sha256="0" * 64
    )
    outcome = call(audit.main, folder)
    assert outcome.code == 2 and "does not exist" in outcome.err and not requests


def test_a_configuration_is_audited_against_its_baseline():
    """The page had held every repeat against vanilla's first, and against a vanilla of another execution."""
    vanilla = []
    for repeat, ids in enumerate(([1, 2], [1, 3])):
        vanilla.append(made("vanilla", [said(1, ids)], repeat=repeat))
    other = made("pld", [said(1, [1, 3])], repeat=1)
    (audited,) = audits(pools([*vanilla, other]))
    assert (len(audited.turns), audited.identical) == (1, 1), "of the same repeat"

    elsewhere = made("vanilla", [said(1, [1, 2])])
    elsewhere.metadata["settings"]["execution"] = "graph"
    assert audits(pools([elsewhere, other])) == []
    hf = made("hf", [said(1, [1, 2, 3])])
    of_hf = {audit.pool.label: audit for audit in audits(pools([elsewhere, hf, other]), "hf")}
    assert [turn.differs_at for turn in of_hf["pld"].turns] == [1]

    drawn = [made(label, [said(1, [1, 2])]) for label in ("hf", "vanilla", "pld")]
    for run in drawn:
        run.metadata["settings"]["sampling"] = {"temperature": 1.0}
    names = [audit.pool.label for audit in audits(pools(drawn))]
    assert names == ["pld"], "hf draws by other noise"
    assert audits(pools(drawn[::2]), "hf") == []


def test_turns_are_paired_by_the_question_and_not_by_its_number():
    runs = []
    for label, prompt in (("vanilla", "a"), ("pld", "b")):
        runs.append(made(label, [asked(1, "qa", [([1], 1.0)], prompt, output_ids=[[7]])]))
    assert audits(pools(runs)) == []
