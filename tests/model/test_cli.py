"""The command: a chat in a terminal and in a pipe, prompts from a file, and mistakes in one line."""

import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from model.cli import Chat, main, summary, talk
from model.decoder import Answer, Decoder
from model.engine import GREEDY
from model.files import ROOT
from tools.hub_repository import write_repository

EMBEDDED = str(ROOT / "data/embedded")


@pytest.fixture(scope="module")
def decoder():
    return Decoder.from_pretrained(EMBEDDED)


@pytest.fixture
def said(decoder, monkeypatch, capsys):
    """What `generate` prints, in this process, with the one model."""

    def loaded(folder, *, dtype, device, quantize, trust_remote_code, **settings):
        return Decoder(decoder.target.model, decoder.tokenizer, **settings)

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(Decoder, "from_pretrained", loaded)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        main(["generate", EMBEDDED, "--jsonl", *arguments])
        return [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]

    return run


@pytest.fixture
def chat(decoder):
    """Make a chat and return it with what it prints."""

    def make(of=decoder, colours=False, max_new_tokens=8, sampling=GREEDY, **more):
        out = io.StringIO()
        limits = dict(max_new_tokens=max_new_tokens, sampling=sampling, **more)
        return Chat(of, out, colours=colours, **limits), out

    return make


def test_a_pipe_gets_plain_text():
    text = "Hello there.\n/method pld\nNäme a river.\n/quit\nno\n"
    command = [sys.executable, "-m", "model.cli", "chat", EMBEDDED, "--max-new-tokens", "12"]
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, input=text.encode(), capture_output=True, cwd=ROOT, timeout=120, env=ascii_only
    )
    lines = [line for line in done.stdout.decode().splitlines() if line.strip()]
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert len(lines) == 3 and lines[1] == "method pld", "two answers and a note"
    assert b"\033" not in done.stdout + done.stderr and b"MAT" not in done.stdout


def test_prompts_of_a_file_are_answered_as_objects(tmp_path, decoder, said):
    """U+2028, U+0085, form feeds and a lone carriage return are text."""
    prompts = ["one\u2028two", "three\x0cfour\x85five", "six\rseven", "Näme a river."]
    content = f"{prompts[0]}\n{prompts[1]}\r\n\n{prompts[2]}\n{prompts[3]}"
    (tmp_path / "prompts").write_bytes(content.encode("utf-8-sig"))
    asked = ["--file", str(tmp_path / "prompts"), "--max-new-tokens", "9"]
    rows = said(*asked)
    assert [row["prompt"] for row in rows] == prompts
    for row in rows:
        assert sum(row["accept_lengths"]) == len(row["ids"]) <= 9
        record = row["metrics"]["speculative_decoding"]
        assert sum(record["acceptance_histogram"]) == record["num_spec_steps"]
        assert row["text"] == decoder.text_of(row["ids"])
    piped = said("--file", "-", *asked[2:], "--batch", "2", stdin=content.encode())
    assert [row["ids"] for row in piped] == [row["ids"] for row in rows]


def test_options_reach_the_decoder(decoder, said, chat):
    raw = ["--prompt", "The sky is", "--raw", "--max-new-tokens", "5"]
    plain = decoder.generate("The sky is", max_new_tokens=5)
    assert said(*raw)[0]["ids"] == plain.ids
    assert said(*raw, "--temperature", "9", "--method", "vanilla")[0]["ids"] != plain.ids
    stop = plain.text[:2]
    assert said(*raw, "--stop", stop)[0]["stop"] == "stop"
    talking, out = chat(stop=[stop])
    talking.say("The sky is")
    assert out.getvalue() == talking.turns[1]["content"] + "\n"


def test_a_prompt_gets_the_template_that_there_is_or_none(decoder, said, monkeypatch):
    text = "Hello there."
    few = ["--prompt", text, "--max-new-tokens", "8"]
    template = "{{ messages[0].content }}{% if loud %} LOUD{% endif %}"
    monkeypatch.setattr(decoder.tokenizer, "chat_template", template)
    for more, asked in (([], text), (["--chat-template-kwargs", '{"loud": true}'], f"{text} LOUD")):
        ids = decoder.tokenizer(asked, add_special_tokens=False).input_ids
        assert said(*few, *more)[0]["ids"] == decoder.generate(ids, max_new_tokens=8).ids
    monkeypatch.setattr(decoder.tokenizer, "chat_template", None)
    (row,) = said(*few)
    assert row["ids"] == decoder.generate(text, max_new_tokens=8).ids and "messages" not in row


def test_a_last_line_says_how_fast_it_was_and_whether_drafting_paid(decoder, monkeypatch):
    answers = [
        Answer("a", [1] * 9, [4, 5], "eos", 0.0),
        Answer("b", [2] * 3, [1, 1, 1], "eos", 1.5),
    ]
    speed = "12 tokens in 5 steps: 2.40 a step, 4.0 tokens/s and 1.5 s of setup"
    sizes = {"sizes": [0, 8], "plain_steps": 5, "steps_by_size": [1, 2]}
    described = {"predicted_speedup": 1.254}
    monkeypatch.setattr(decoder.method, "describe", lambda: described)
    paid = "; drafting paid: about 1.25 times plain decoding"
    assert summary(decoder, answers, 4.5) == speed + paid
    assert summary(decoder, answers, 4.5, batch=2) == speed
    described |= {"predicted_speedup": 0.98, **sizes}
    assert "; steps: 75 % of 0, 25 % of 8 nodes: about 0.98" in summary(decoder, answers, 4.5)


HUB = "generate HuggingFaceTB/SmolLM2-135M-Instruct --prompt x"
GENERATE = f"generate {EMBEDDED} --prompt x"
MISTAKES = {
    "generate /nowhere --prompt x": "model /nowhere: no such folder",
    HUB: "in a checkout `python -m evaluation.prefetch model=smollm2",
    f"generate {EMBEDDED} --file /nowhere": "--file /nowhere: cannot be read",
    f"{GENERATE} --method magic": "method magic: unknown",
    f"{GENERATE} --method sps": "method.draft_path: Speculative needs this setting",
    f"{GENERATE} --set k": "--set k: must be KEY=VALUE",
    f"{GENERATE} --set execution=abc": "--set execution=abc: execution is no setting of",
    f"{GENERATE} --max-new-tokens 0": "max_new_tokens=0",
    f"{GENERATE} --dtype foo": "dtype=foo: use one of auto",
    f"{GENERATE} --max_new_token 4": "no such option; did you mean --max-new-tokens?",
    f"{GENERATE} --set nods=4": "method.nods: no such setting; did you mean nodes?",
}


def test_a_mistake_is_one_line(capsys):
    for command, says in MISTAKES.items():
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        error = capsys.readouterr().err
        assert ended.value.code == 2 and says in error and error.count("\n") == 1, command


def test_commands_of_a_chat(chat):
    talking, out = chat()
    assert talking.say("Hello there.") and len(talking.turns) == 2
    for line, says in (
        ("/method recycling tree=best:9", "method recycling tree=best:9"),
        ("/method dynamic nodes=5", "method dynamic"),
        ("/method nonesuch", "unknown"),
        ("/method dynamic eos=1", "eos is no setting of a method"),
        ("/help", "methods: vanilla"),
        ("/nonsense", "no such command"),
    ):
        out.truncate(0)
        assert talking.say(line) and says in out.getvalue(), line
    assert talking.decoder.method.nodes == 5
    assert len(talking.turns) == 2 and talking.say("/reset") and talking.turns == []
    assert not talking.say("/quit")


def test_a_chat_that_is_too_long_says_what_to_do(decoder, chat):
    short = Decoder(decoder.target.model, decoder.tokenizer, context=128)
    talking, out = chat(short, max_new_tokens=40)
    assert talking.say("word " * 200) and "prompt of" in out.getvalue()
    assert talking.turns == [], "the turn is taken back"
    for _ in range(9):
        talking.say("Tell me about a river.")
    assert "/reset forgets it" in out.getvalue()
    talking.say("/reset")
    assert talking.say("Hello there.") and len(talking.turns) == 2


def test_a_chat_in_a_terminal(chat, monkeypatch):
    """Lines that are typed, one that Ctrl-C discards, and Ctrl-D."""
    typed = iter(["Hello there. Hello there.", KeyboardInterrupt, "/help", EOFError])

    def read(prompt):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setitem(sys.modules, "readline", None)  # Windows has none
    talking, out = chat(colours=True, max_new_tokens=40)
    talk(talking)
    assert next(typed, None) is None
    answer, _, after = out.getvalue().partition("MAT ")
    assert re.search("\033\\[3[2356]m", answer), "runs are coloured by length"
    assert re.match(r"\d+\.\d\d, [\d.]+ tokens/s; first token after", after)
    assert "Ctrl-C stops an answer" in after


def test_ctrl_c_stops_the_answer_and_not_the_chat(decoder, chat, monkeypatch):
    steps_of = decoder.stream

    def interrupted(*arguments, **settings):
        for number, step in enumerate(steps_of(*arguments, **settings)):
            if number == 3:
                raise KeyboardInterrupt
            yield step

    talking, out = chat(max_new_tokens=60)
    monkeypatch.setattr(decoder, "stream", interrupted)
    assert talking.say("Hello there.") and len(talking.turns) == 2
    assert talking.turns[1]["content"] == out.getvalue().rstrip("\n") != ""
    monkeypatch.undo()
    assert talking.say("And now?") and len(talking.turns) == 4


HARNESS = ("hydra", "omegaconf", "fastchat", "pandas", "matplotlib", "evaluation", "model")
WITHOUT = f"import sys; sys.modules |= dict.fromkeys({HARNESS!r})\n"
FROM_THE_HUB = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(PATH, dtype="float32")
text = "USER: Tell me about a river. ASSISTANT:"
inputs = AutoTokenizer.from_pretrained(PATH)(text, return_tensors="pt")
plain = model.generate(**inputs, do_sample=False, max_new_tokens=24)
for more in ({}, {"method": "pld"}, {"start": "cold", "method_settings": {"nodes": 9}}):
    options = dict(custom_generate=HUB, trust_remote_code=True, do_sample=False, max_new_tokens=24)
    print(model.generate(**inputs, **options, **more).equal(plain))
kept = vars(model)["_token_recycling_generate"]
assert [key[:2] for key in kept] == [("dynamic", "hot"), ("pld", "hot"), ("dynamic", "cold")]
"""


@pytest.mark.slow
def test_a_wheel_works_without_the_harness(tmp_path):
    """Built from what git knows, and run where the harness's packages cannot be imported."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    listed = ["git", "ls-files", "model", "pyproject.toml", "README.md", "LICENSE"]
    done = subprocess.run(listed, cwd=ROOT, text=True, capture_output=True, check=True)
    files = done.stdout.split()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    where = ["-w", str(tmp_path), str(source)]
    subprocess.run([*wheel, *where], check=True, capture_output=True, timeout=240)
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "there")
    inside = [name for name in files if name.startswith("model/")]
    assert {f"token_recycling/{Path(name).relative_to('model')}" for name in inside} <= names

    environment = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    environment |= {"HF_MODULES_CACHE": str(tmp_path / "modules")}

    def run(program):
        command = [sys.executable, "-c", f"{WITHOUT}{program}"]
        how = dict(cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment)
        done = subprocess.run(command, **how)
        assert done.returncode == 0, done.stderr
        return done.stdout

    arguments = ["generate", EMBEDDED, "--prompt", "Hello there.", "--max-new-tokens", "8"]
    assert run(f"from token_recycling.cli import main; main({arguments!r})").strip()
    write_repository(tmp_path / "hub")
    paths = f"PATH, HUB = {EMBEDDED!r}, {str(tmp_path / 'hub')!r}\n"
    assert run(f"{paths}{FROM_THE_HUB}").split() == ["True"] * 3
