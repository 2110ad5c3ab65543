"""The command: a chat in a real pseudo-terminal and in a pipe, prompts from a file, and mistakes in one line."""

import io
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from model import __version__
from model.cli import Chat, main, summary, talk
from model.decoder import Answer, Decoder
from model.engine import StepRecord
from model.engine.sampling import GREEDY, Sampling
from model.errors import UserError
from model.files import ROOT
from model.tuning import Execution
from tools.hub_repository import write_repository

EMBEDDED = str(ROOT / "data/embedded")
SPEED = "12 tokens in 5 steps: 2.40 a step, 4.0 tokens/s and 1.5 s of setup"
COMMAND = [sys.executable, "-m", "model.cli"]


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


def test_a_pipe_gets_plain_text():
    text = "Hello there.\n/method pld\nHello there.\n/quit\nno\n"
    done = subprocess.run(
        [*COMMAND, "chat", EMBEDDED, "--max-new-tokens", "12"],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    out = done.stdout
    assert (
        done.returncode == 0
        and "\033" not in out + done.stderr
        and "method pld" in out
        and "MAT" not in out
    )
    assert len([line for line in out.splitlines() if line.strip()]) == 3, "two answers and a note"


def test_prompts_of_a_file_are_answered_as_objects(tmp_path, decoder, said):
    (tmp_path / "prompts").write_text("Hello there.\n\nNäme a river.\n", encoding="utf-8-sig")
    rows = said("--file", str(tmp_path / "prompts"), "--max-new-tokens", "9")
    assert [row["prompt"] for row in rows] == ["Hello there.", "Näme a river."]
    assert all(sum(row["accept_lengths"]) == len(row["ids"]) <= 9 for row in rows)
    for record in (row["metrics"]["speculative_decoding"] for row in rows):
        assert (
            sum(record["acceptance_histogram"])
            == record["num_spec_steps"]
            == len(record["per_step_drafted"])
        )
    assert rows[0]["text"] == decoder.text_of(rows[0]["ids"])
    together = said("--file", str(tmp_path / "prompts"), "--max-new-tokens", "9", "--batch", "2")
    assert [row["ids"] for row in together] == [row["ids"] for row in rows]
    raw = ["--prompt", "The sky is", "--raw", "--max-new-tokens", "5"]
    drawn = [
        said(*raw, *more)[0]["ids"] for more in ([], ["--temperature", "9", "--method", "vanilla"])
    ]
    assert drawn[0] == decoder.generate("The sky is", max_new_tokens=5).ids != drawn[1]


def test_a_prompt_gets_the_template_that_there_is_or_none(decoder, said, monkeypatch):
    """Any model without one had got Vicuna's text in silence."""
    few, text = ["--prompt", "Hello there.", "--max-new-tokens", "8"], "Hello there."
    stop = decoder.generate(decoder.ids_of([{"role": "user", "content": text}])).text[:2]
    (stopped,) = said(*few, "--stop", stop)
    assert stopped["stop"] == "stop" and len(stopped["ids"]) < 8
    Chat(
        decoder, out := io.StringIO(), colours=False, max_new_tokens=8, sampling=GREEDY, stop=[stop]
    ).say(text)
    assert out.getvalue() == stopped["text"] + "\n"
    monkeypatch.setattr(
        decoder.tokenizer, "chat_template", "{{ messages[0].content }}{% if loud %} LOUD{% endif %}"
    )
    for more, asked in (([], text), (["--chat-template-kwargs", '{"loud": true}'], f"{text} LOUD")):
        ids = decoder.tokenizer(asked, add_special_tokens=False).input_ids
        assert said(*few, *more)[0]["ids"] == decoder.generate(ids, max_new_tokens=8).ids
    monkeypatch.setattr(decoder.tokenizer, "chat_template", None)
    (row,) = said(*few)
    assert row["ids"] == decoder.generate(text, max_new_tokens=8).ids and "messages" not in row
    with pytest.raises(UserError, match="is a chat, and the tokenizer has no template"):
        decoder.ids_of([{"role": "user", "content": text}])
    by_code = {
        "apply_chat_template": lambda tokenizer, turns, **options: [5, 6, len(turns[0]["content"])]
    }
    with monkeypatch.context() as patched:  # mistral-common's: no template, and yet prompts
        patched.setattr(
            decoder.tokenizer, "__class__", type("Own", (type(decoder.tokenizer),), by_code)
        )
        assert said(*few)[0]["ids"] == decoder.generate([5, 6, len(text)], max_new_tokens=8).ids
    monkeypatch.setattr(decoder.target, "name", "lmsys/vicuna-7b-v1.3")
    assert (
        decoder.tokenizer.decode(decoder.ids_of([{"role": "user", "content": text}])).count(
            "USER: Hello"
        )
        == 1
    )


def test_a_last_line_says_how_fast_it_was_and_whether_drafting_paid(decoder, monkeypatch, capsys):
    monkeypatch.setattr(Decoder, "from_pretrained", lambda *_, **__: decoder)
    monkeypatch.setattr(time, "perf_counter", iter((10.0, 14.5)).__next__)
    answers = [
        Answer("a", [1] * 9, [4, 5], "eos", 0.0),
        Answer("b", [2] * 3, [1, 1, 1], "eos", 1.5),
    ]
    monkeypatch.setattr(decoder, "answers", lambda *_, **__: iter(answers))
    monkeypatch.setattr(decoder.method, "describe", lambda: {"predicted_speedup": 1.254})
    # which reads the clock if OMP_NUM_THREADS is unset
    monkeypatch.setattr("model.cli.choose_threads", lambda *_: "")
    arguments = ["generate", EMBEDDED, "--file", "-", "--raw"]
    for more, says in (
        (["--quiet"], ""),
        ([], f"{SPEED}; drafting paid: about 1.25 times plain decoding\n"),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"one\ntwo\n")))
        monkeypatch.setattr(time, "perf_counter", iter((10.0, 14.5)).__next__)
        main([*arguments, *more])
        assert capsys.readouterr() == ("a\nb\n", says)
    figures = {
        "predicted_speedup": 0.98,
        "sizes": [0, 8],
        "plain_steps": 5,
        "steps_by_size": [1, 2],
    }
    monkeypatch.setattr(decoder.method, "describe", lambda: figures)
    said = "steps: 75 % of 0, 25 % of 8 nodes: about 0.98 times plain decoding"
    assert summary(decoder, answers, 4.5) == f"{SPEED}; {said}"
    # a fixed size: no plain step to compare with
    monkeypatch.setattr(decoder.method, "describe", lambda: {})
    assert summary(decoder, answers[:1], 4.5) == "9 tokens in 2 steps: 4.50 a step, 2.0 tokens/s"


def test_a_prompt_ends_with_its_line_alone(tmp_path, said):
    """U+2028, U+0085, form feeds and a lone carriage return are text, in a file and on standard input."""
    prompts = ["one\u2028two", "three\x0cfour\x85five", "six\rseven", "eight"]
    content = f"{prompts[0]}\n{prompts[1]}\r\n\n{prompts[2]}\n{prompts[3]}".encode()
    (tmp_path / "prompts").write_bytes(content)
    for file in ("-", str(tmp_path / "prompts")):
        rows = said("--max-new-tokens", "1", "--method", "vanilla", "--file", file, stdin=content)
        assert [row["prompt"] for row in rows] == prompts


@pytest.mark.slow  # compiles the loops of drafting anew
def test_what_a_code_page_lacks_is_escaped_and_what_is_no_text_is_one_line(tmp_path):
    """In real processes: streams have their encoding before anything runs. All of these had ended in a traceback."""

    def run(*arguments, stdin=b"", **environment):
        command = [*COMMAND, *arguments, "--max-new-tokens", "2"]
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            cwd=ROOT,
            timeout=120,
            env=os.environ | environment,
        )
        assert b"Traceback" not in done.stderr
        return done

    prompt = "Näme 日本 🙂"
    for encoding in ("ascii", "cp1252"):
        done = run(
            "generate",
            EMBEDDED,
            "--jsonl",
            "--quiet",
            "--prompt",
            prompt,
            PYTHONIOENCODING=encoding,
        )
        assert (
            json.loads(done.stdout.decode(encoding))["prompt"] == prompt
            and b"\\u65e5" in done.stdout
        )
    done = run("generate", EMBEDDED, "--prompt", b"N\xff")
    assert (
        done.returncode == 2
        and done.stderr.startswith(b"error: argument N")
        and done.stderr.count(b"\n") == 1
    )
    done = run(
        "chat", EMBEDDED, stdin=b"\xef\xbb\xbf/help\nN\xff\n/quit\n", PYTHONIOENCODING="utf-8"
    )
    assert (
        done.returncode == 0
        and b"methods: vanilla" in done.stdout
        and b"surrogate" not in done.stdout
    )


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"token-recycling {__version__}\n"


def test_a_hub_out_of_reach_is_said_at_once_with_what_there_is_instead(monkeypatch, capsys):
    """The hub's client had retried for two minutes, in 20 lines."""
    # nobody listens there
    monkeypatch.setattr("model.pretrained.constants.ENDPOINT", "http://127.0.0.1:9")
    for name, says in (
        ("nobody/nothing", ""),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "prefetch model=smollm2-135m"),
    ):
        started = time.perf_counter()
        with pytest.raises(SystemExit):
            main(["generate", name, "--prompt", "x"])
        error = capsys.readouterr().err
        assert (
            "http://127.0.0.1:9 is not in reach" in error
            and says in error
            and error.count("\n") == 1
        )
        assert time.perf_counter() - started < 30


MISTAKES = [
    (["generate", "/nowhere", "--prompt", "x"], "model /nowhere: no such folder"),
    (["generate", EMBEDDED, "--file", "/nowhere"], "--file /nowhere: cannot be read"),
    (["generate", EMBEDDED, "--prompt", "x", "--method", "magic"], "method magic: unknown"),
    (["generate", EMBEDDED, "--prompt", "x", "--set", "k"], "--set k: must be KEY=VALUE"),
    *(
        (
            ["generate", EMBEDDED, "--prompt", "x", "--set", f"{name}=abc"],
            f"--set {name}=abc: {name} is no setting of",
        )
        for name in (
            "execution",
            "dtype",
            "device",
            "linear",
            "quantize",
            "model",
            "tokenizer",
            "eos",
        )
    ),
    (["generate", EMBEDDED, "--prompt", "x", "--temperature", "-1"], "sampling.temperature=-1.0"),
    (["generate", EMBEDDED, "--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
    (["generate", EMBEDDED, "--prompt", "x", "--device", "foo"], "device=foo"),
    (["generate", EMBEDDED, "--prompt", "x", "--dtype", "foo"], "dtype=foo: use one of auto"),
    (
        ["generate", EMBEDDED, "--prompt", "x", "--method", "sps"],
        "method.draft_path: Speculative needs this setting",
    ),
    (["generate", EMBEDDED, "--prompt", "x", "--set", "k=abc"], "method.k=abc: must be"),
    (["generate", EMBEDDED, "--prompt", "x", "--seed", "99999999999999999999"], "sampling.seed="),
]


def test_a_mistake_is_one_line(capsys):
    for arguments, says in MISTAKES:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        err = capsys.readouterr().err
        assert ended.value.code == 2 and says in err and err.count("\n") == 1, arguments


def test_commands_of_a_chat(decoder):
    out = io.StringIO()
    chat = Chat(decoder, out, colours=False, max_new_tokens=8, sampling=GREEDY)
    assert chat.say("Hello there.") and len(chat.turns) == 2
    for line, says in (
        ("/method recycling tree=best:9", "method recycling tree=best:9"),
        ("/method dynamic nodes=5", "method dynamic"),
        ("/method nonesuch", "unknown"),
        (
            "/method pld depth=3",
            "method.depth: no such setting; PromptLookup has max_ngram, draft_tokens",
        ),
        ("/method pld max_ngram=x", "method.max_ngram=x: must be"),
        ("/method rest", "datastore_path: Rest needs this setting"),
        ("/method dynamic eos=1", "eos is no setting of a method"),
        ("/temperature 0.7", "temperature 0.7"),
        ("/temperature hot", "must be a number"),
        ("/temperature -1", "out of range"),
        ("/help", "methods: vanilla"),
        ("/nonsense", "no such command"),
        ("/", "no such command"),
    ):
        out.truncate(0)
        assert chat.say(line) and says in out.getvalue(), line
    assert chat.sampling.temperature == 0.7 and chat.decoder.method.nodes == 5
    assert len(chat.turns) == 2 and chat.say("/reset") and chat.turns == []
    assert not chat.say("/quit")


def test_a_chat_that_is_too_long_says_what_to_do(decoder):
    out, short = io.StringIO(), Decoder(decoder.target.model, decoder.tokenizer, context=128)
    chat = Chat(short, out, colours=False, max_new_tokens=40, sampling=GREEDY)
    assert chat.say("word " * 200) and "prompt of" in out.getvalue() and chat.turns == [], (
        "the turn is taken back"
    )
    for _ in range(9):
        chat.say("Tell me about a river.")
    assert "/reset forgets it" in out.getvalue()
    chat.say("/reset")
    assert chat.say("Hello there.") and len(chat.turns) == 2


# A title, a colour, C1's CSI, a bell, a carriage return, DEL, and text in reverse; é, a tab and a newline are text.
HOSTILE = "a\033]2;owned\007\033[31mé\x9b2J\a\rx\x7f\u202ey\u2066z\tt\nb\u200f"
SHOWN = (
    r"a\u001b]2;owned\u0007\u001b[31mé\u009b2J\u0007\u000dx\u007f\u202ey\u2066z" + "\tt\nb\u200f"
)


def refused(*arguments, **settings):
    raise UserError(f"template says {HOSTILE}")


@pytest.mark.parametrize("colours", [False, True])
def test_a_chat_shows_control_characters_and_sends_none(decoder, monkeypatch, colours):
    """Also where a sequence comes in several pieces, and in errors, which quote a tokenizer's template."""
    out = io.StringIO()
    chat = Chat(decoder, out, colours=colours, max_new_tokens=60, sampling=GREEDY)
    steps = [StepRecord([i], 1, ()) for i in range(len(HOSTILE))]
    monkeypatch.setattr(decoder, "stream", lambda *arguments, **settings: (step for step in steps))
    # a character a token
    monkeypatch.setattr(decoder, "text_of", lambda ids: "".join(HOSTILE[i : i + 1] for i in ids))
    chat.say("Hello there.")
    own = re.compile(r"\033\[[0-9;]*m" if colours else "(?!)")
    assert chat.turns[1]["content"] == HOSTILE, "kept as it is"
    assert own.sub("", out.getvalue()).startswith(SHOWN)
    out.truncate(0)
    monkeypatch.setattr(decoder, "ids_of", refused)
    chat.say("And now?")
    assert f"template says {SHOWN}" in out.getvalue()


def test_an_answer_is_exact_in_a_file_and_harmless_in_a_terminal(decoder, monkeypatch, capsys):
    monkeypatch.setattr(Decoder, "from_pretrained", lambda *_, **__: decoder)
    monkeypatch.setattr(decoder, "text_of", lambda ids: HOSTILE)
    for terminal in (False, True):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal)
        main(["generate", EMBEDDED, "--prompt", "x", "--max-new-tokens", "2"])
        assert capsys.readouterr().out.removesuffix("\n") == (SHOWN if terminal else HOSTILE)
    main(["generate", EMBEDDED, "--prompt", "x", "--max-new-tokens", "2", "--jsonl"])
    out = capsys.readouterr().out.removesuffix("\n")
    controls = "[\x00-\x1f\x7f-\x9f\u202e\u2066]"
    assert json.loads(out)["text"] == HOSTILE and not re.search(controls, out)
    monkeypatch.setattr(Decoder, "from_pretrained", refused)
    with pytest.raises(SystemExit):
        main(["generate", "x", "--prompt", "x"])
    assert not re.search(controls, capsys.readouterr().err.removesuffix("\n"))


def test_a_chat_in_a_terminal(decoder, monkeypatch):
    """Lines that are typed, one that Ctrl-C discards, and Ctrl-D."""
    typed = iter(["Hello there. Hello there.", KeyboardInterrupt, "/help", EOFError])

    def read(prompt):
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    talk(Chat(decoder, out, colours=True, max_new_tokens=40, sampling=GREEDY))
    assert next(typed, None) is None
    answer, _, after = out.getvalue().partition("MAT ")
    assert re.search("\033\\[3[2356]m", answer), "runs are coloured by length"
    assert re.match(r"\d+\.\d\d, [\d.]+ tokens/s; first token after", after)
    assert "Ctrl-C stops an answer" in after and "of setup" not in after


def test_the_time_to_make_captured_steps_is_shown_once(decoder, monkeypatch):
    # Its tree has one size; other methods may draft a size in the second answer that the first did not have.
    published = Decoder(decoder.target.model, decoder.tokenizer, method="recycling", tree="2.2.2")
    monkeypatch.setattr(published, "execution", Execution("static"))
    out = io.StringIO()
    chat = Chat(published, out, colours=True, max_new_tokens=40, sampling=GREEDY)
    chat.say("Hello there.")
    assert re.search(r"tokens/s; first token after [\d.]+ s; [\d.]+ s of setup", out.getvalue())
    chat.say("/reset")
    chat.say("Hello there.")
    assert out.getvalue().count("of setup") == 1 and out.getvalue().count("first token") == 2


def test_ctrl_c_stops_the_answer_and_not_the_chat(decoder, monkeypatch):
    out, chat_steps = io.StringIO(), decoder.stream

    def interrupted(*arguments, **settings):
        for number, step in enumerate(chat_steps(*arguments, **settings)):
            if number == 3:
                raise KeyboardInterrupt
            yield step

    chat = Chat(decoder, out, colours=False, max_new_tokens=60, sampling=GREEDY)
    monkeypatch.setattr(decoder, "stream", interrupted)
    assert chat.say("Hello there.") and len(chat.turns) == 2
    assert chat.turns[1]["content"] == out.getvalue().rstrip("\n") != ""
    monkeypatch.undo()
    assert chat.say("And now?") and len(chat.turns) == 4


def test_a_turn_of_each_seed_has_noise_of_its_own(decoder, monkeypatch):
    """Seed 0's second answer had the seed of the first of seed 2."""
    seeds = []
    stream = decoder.stream
    monkeypatch.setattr(
        decoder, "stream", lambda *a, **way: seeds.append(way["sampling"].seed) or stream(*a, **way)
    )
    for seed in range(4):
        sampling = Sampling(temperature=1.0, seed=seed)
        chat = Chat(decoder, io.StringIO(), colours=False, max_new_tokens=2, sampling=sampling)
        for line in ("Hello there.", "And now?", "And then?"):
            chat.say(line)
        assert seeds[3 * seed] == seed, "as `generate` of the same seed"
    assert len(set(seeds)) == 4 * 3


FROM_THE_HUB = """
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(PATH, dtype="float32")
inputs = AutoTokenizer.from_pretrained(PATH)("USER: Tell me about a river. ASSISTANT:", return_tensors="pt")
plain = model.generate(**inputs, do_sample=False, max_new_tokens=24)
for more in ({}, {"method": "pld"}, {"start": "cold", "method_settings": {"nodes": 9}}):
    options = dict(custom_generate=HUB, trust_remote_code=True, do_sample=False, max_new_tokens=24)
    print(model.generate(**inputs, **options, **more).equal(plain))
kept = vars(model)["_token_recycling_generate"]
assert [(name, start) for name, start, _ in kept] == [("dynamic", "hot"), ("pld", "hot"), ("dynamic", "cold")]
"""


@pytest.mark.slow
def test_a_wheel_works_without_the_harness(tmp_path):
    """Built from what git knows, unpacked elsewhere, and run where the harness's packages cannot be imported."""
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    listed = ["git", "ls-files", "model", "pyproject.toml", "README.md", "LICENSE"]
    files = subprocess.run(
        listed, cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout.split()
    for name in files:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run(
        [*wheel, "-w", str(tmp_path), str(source)], check=True, capture_output=True, timeout=240
    )
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as packed:
        names = set(packed.namelist())
        packed.extractall(tmp_path / "there")
    inside = {
        f"token_recycling/{Path(name).relative_to('model')}"
        for name in files
        if name.startswith("model/")
    }
    assert inside <= names, "every module and tree is in it"
    harness = ("hydra", "omegaconf", "fastchat", "pandas", "matplotlib", "evaluation", "model")
    arguments = ["generate", EMBEDDED, "--prompt", "Hello there.", "--max-new-tokens", "8"]
    without = f"import sys; sys.modules |= dict.fromkeys({harness!r})\n"
    program = f"{without}from token_recycling.cli import main; main({arguments!r})"
    there = os.environ | {
        "PYTHONPATH": str(tmp_path / "there"),
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }

    def run(program, environment):
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
        )

    done = run(program, there)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    write_repository(tmp_path / "hub")
    program = f"{without}PATH, HUB = {EMBEDDED!r}, {str(tmp_path / 'hub')!r}\n{FROM_THE_HUB}"
    done = run(program, there)
    assert done.returncode == 0 and done.stdout.split() == ["True"] * 3, done.stderr
    done = run(program, os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules")})
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last == f"token-recycling>={__version__} (installed: None)"
