"""The bench of low repetition is what its program writes."""

import json

from data.novelty.write import FILE, questions
from evaluation.loading.bench import load_bench


def test_the_committed_file_is_what_the_program_writes():
    assert [
        json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()
    ] == questions()
    bench = load_bench("novelty", "data/novelty/question.jsonl")
    assert len(bench.questions) == 30 and len({q.category for q in bench.questions}) == 6
