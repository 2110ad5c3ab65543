"""The audit: made-up records by hand, and the logit gap on a real model against a plain forward."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation import audit
from evaluation.loading.bench import answer_text, chat_of, prompt_ids
from evaluation.records.runs import read_runs
from evaluation.statistics.agreement import GAPS, audit_table, audits, wording
from evaluation.statistics.pools import pools
from evaluation.tables.experiment import Experiment
from evaluation.tables.rendering import write_audit
from tests.evaluation.made_runs import answer, made


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


def test_turn_by_turn_by_hand():
    (audited,) = audits(pools([VANILLA, OTHER]))
    # question 1 parts in its first turn, so its second says nothing; 3 goes on where vanilla has ended, 4 ends at once
    assert (len(audited.turns), audited.identical, audited.tokens, audited.left_out) == (4, 1, 8, 1)
    assert [(p.question_id, p.turn, p.differs_at) for p in audited.different] == [
        (1, 0, 2),
        (3, 0, 1),
        (4, 0, 0),
    ]
    gaps = {("other", "1", "0", "0", "2"): 0.25}
    (row,) = audit_table([audited], gaps).to_dict("records")
    assert row["identical_share"] == 1 / 4 and row["first_difference_question"] == 1
    assert row["gaps_known"] == 1 and row["largest_logit_gap"] == 0.25


def test_what_holds_no_token_ids_is_not_passed(tmp_path):
    """A turn without its entry had been dropped in silence, and two empty ones had been equal."""
    lacking = said(1, [1, 2])
    lacking["choices"][0]["turns"] = ["text"] * 2
    empty = said(2, [])
    runs = [
        made("vanilla", [said(1, [1, 2], [3]), empty, said(3, [1], [2])]),
        made("pld", [lacking, empty, said(3, [1]), said(4, [1])]),
    ]
    (line,) = wording(audit_table(audits(pools(runs)), {}), tmp_path)
    assert line.startswith("Lossless in float32: all 2 turns equal") and line.endswith(
        "; 4 turns are not compared."
    )


def test_the_words_of_each_type(tmp_path):
    def words(runs, gaps):
        return wording(audit_table(audits(pools(runs)), gaps), tmp_path)

    same = made("pld", VANILLA.answers)
    (line,) = words([VANILLA, same], {})
    assert line.startswith("Lossless in float32: all 5 turns equal vanilla's, token for token")
    half = [
        made(r.label, r.answers, model={"dtype": "float16"}, folder=str(r.folder))
        for r in (VANILLA, OTHER)
    ]
    (line,) = words(half, {})
    assert line.startswith("Not identical in float16: 1 of 4 turns")
    assert f"python -m evaluation.audit {tmp_path}" in line
    places = {("1", "2"): 0.25, ("3", "1"): 0.125, ("4", "0"): 0.0}
    gaps = {("other", question, "0", "0", at): gap for (question, at), gap in places.items()}
    assert "two largest logits are at most 0.25 apart" in words(half, gaps)[0]
    (wrong,) = words([VANILLA, OTHER], gaps)
    assert "in float32: 1 of 4 turns" in wrong and "Lossless" not in wrong


def test_without_vanilla_there_is_no_audit(tmp_path, call):
    assert (
        write_audit(Experiment([OTHER]), tmp_path / "tables") == []
        and not (tmp_path / "tables").exists()
    )
    assert "no runs here" in call(audit.main, tmp_path).err


@pytest.fixture
def foreign(evaluate, tmp_path):
    """A folder of somebody else's in which the first question's answers differ in the second turn."""
    words = ("-m", "method=vanilla,pld", "name=f", "max_new_tokens=6", "bench.end=1")
    assert evaluate(*words).code == 0
    folder = tmp_path / "results/f"
    run = next(run for run in read_runs(folder) if run.label != "vanilla")
    (row,) = run.answers
    choice = row["choices"][0]
    choice["output_ids"][1][3] = (choice["output_ids"][1][3] + 1) % 300
    choice["turns"] = ["", ""]  # as in compact records
    (run.folder / "answers.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def rewrite(folder, part, **settings):
    """Change what the runs' metadata say."""
    for path in folder.glob("runs/*/metadata.json"):
        metadata = json.loads(path.read_text())
        metadata["config"][part] |= settings
        path.write_text(json.dumps(metadata))


def test_the_gap_is_the_targets_own(foreign, call, checkpoint, bench_file):
    outcome = call(audit.main, foreign)
    assert outcome.code == 0, outcome.err
    (entry,) = json.loads((foreign / GAPS).read_text())
    run = next(run for run in read_runs(foreign) if run.label != "vanilla")
    first, second = run.answers[0]["choices"][0]["output_ids"]

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    asked = json.loads(bench_file.read_text().splitlines()[0])["turns"]
    said = answer_text("vicuna_v1.1", tokenizer, first)
    prompt = prompt_ids("vicuna_v1.1", tokenizer, chat_of(asked, [said]))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
        logits = model(torch.tensor([prompt + second[:3]])).logits[0, -1]
    best = logits.topk(2).values.tolist()
    assert entry["gap"] == pytest.approx(best[0] - best[1], abs=1e-4)
    assert f"at most {entry['gap']:.3g} apart" in outcome.out


def test_a_folders_metadata_permit_and_fetch_nothing(foreign, call, monkeypatch):
    """The folder of somebody else's had said that its model's code is trusted, and it was run."""
    loaded = []
    load = audit.load_model

    def noted(settings):
        loaded.append({key for key in audit.PERMISSIONS if getattr(settings, key)})
        return load(settings)

    monkeypatch.setattr(audit, "load_model", noted)
    monkeypatch.setattr("urllib.request.urlopen", None)
    rewrite(foreign, "model", **dict.fromkeys(audit.PERMISSIONS, True))
    for granted in ([], *([key] for key in audit.PERMISSIONS)):
        assert call(audit.main, foreign, *(f"model.{key}=true" for key in granted)).code == 0
        assert loaded.pop() == {*granted}
    rewrite(foreign, "bench", path="data/nowhere/question.jsonl", url="https://example.org/x")
    assert "does not exist" in call(audit.main, foreign).err


def paired(*runs):
    """Each audited label, its baseline's, and where its only turn of each repeat differs."""
    return [
        (one.pool.label, one.base.label, [turn.differs_at for turn in one.turns])
        for one in audits(pools(runs))
    ]


def test_page_and_tables_pair_alike():
    """The page had held every repeat against vanilla's first, and against one of another execution."""
    vanilla = [made("vanilla", [said(1, ids)], repeat=i) for i, ids in enumerate(([1, 2], [1, 3]))]
    other = made("pld", [said(1, [1, 3])], repeat=1)
    assert paired(*vanilla, other) == [("pld", "vanilla", [None])]
    elsewhere = made("vanilla", [said(1, [1, 2])])
    elsewhere.metadata["settings"]["execution"] = "graph"
    assert paired(elsewhere, other) == []
    drawn = [made(label, [said(1, [1, 2])]) for label in ("hf", "hf_lookup", "vanilla", "pld")]
    for run in drawn:
        run.metadata["settings"]["sampling"] = {"temperature": 1.0}
    assert paired(*drawn) == [("pld", "vanilla", [None])], "hf draws by other noise"
