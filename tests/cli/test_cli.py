"""The command line: what it prints, what it refuses, and what it leaves behind."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from helpers.compiled import give_kernels
from helpers.places import ROOT
from helpers.word_model import SMALL_MODEL
from packaging.requirements import Requirement

import mtpc
from mtpc.cli import doctor
from mtpc.cli.anatomy import number_ranges
from mtpc.cli.arguments import parse
from mtpc.cli.main import main
from mtpc.cli.serve import adaptive
from mtpc.cli.tables import format_bytes
from mtpc.declaration import declared
from mtpc.layout import StepKey
from mtpc.layout.display import show_compiling
from mtpc.layout.progress import Progress
from mtpc.layout.terminal import show_progress
from mtpc.plan import make_plan

SMALL = [*SMALL_MODEL, "--spec-tokens", "2"]


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


# ------------------------------------------------------------------------------------ run


def test_run_samples(word_model, cpu_cache, capsys):
    texts, cached = [], ["--max-len", "64", "--cache-dir", str(cpu_cache)]
    for seed in ("3", "3", "4"):
        command = ["run", str(word_model), *cached, "--ids", "8 9", "-n", "9", "--seed", seed]
        more = ["--spec-tokens", "0", "--temperature", "2", "--top-k", "50", "--ignore-eos"]
        assert main([*command, *more]) == 0
        texts.append(capsys.readouterr().out.splitlines()[1])
    assert texts[0] == texts[1] != texts[2]
    assert main(["run", str(word_model), "--top-p", "2"]) != 0
    assert "top_p is 2.0; expected a number in (0, 1]" in capsys.readouterr().err


def test_run_prints_results_and_what_happened(word_model, capsys):
    prompts = ["-p", "w5 w6 w7", "--ids", "8, 9"]
    assert main(["run", str(word_model), *SMALL, *prompts, "-n", "6", "--ignore-eos", "-v"]) == 0
    out, err = capsys.readouterr()
    text, ids = re.search(r"\[1\] w5 w6 w7\n(.*)\n\n\[2\] 8 9\n(.*)\n", out).groups()
    assert len(re.findall(r"w\d+", text)) == 6
    assert len(ids.split()) == 6
    assert all(0 <= int(i) < 96 for i in ids.split())
    assert re.search(r"new tokens +12, 10 of them in decode steps", out)
    assert re.search(r"acceptance length +[123]\.\d\d tokens per step", out)
    assert len(re.search(r"acceptance by position(.*)", out)[1].split()) == 2
    assert re.search(r"replays of prefill\[R=2,Q=32,K=2\] +1,", out)
    assert re.search(r"replays of decode\[R=2,Q=3,K=2\] +\d+,", out)
    assert re.search(r"fallbacks +none", out)
    assert re.search(r"\[ +\d+\.\d s\] 2/2 lower decode\[R=2,Q=3,K=2\]\n", err)


def test_run_says_in_one_line_that_it_compiles(word_model, capsys, tmp_path):
    """No step keys and no differences of the cache, which `-v` shows; then it loads."""
    shared = ["run", str(word_model), *SMALL_MODEL[2:], "--ids", "3 4", "-n", "3"]
    command = [*shared, "--cache-dir", str(tmp_path), "--spec-tokens", "2"]
    give_kernels(tmp_path)
    for stage in (r"compiling \(first time(, about \d+ s)?\)", "load the weights"):
        assert main(command) == 0
        out, err = capsys.readouterr()
        assert len(re.findall(rf"(?m)^\[ +\d+\.\d s\] {stage}", err)) == 1
        assert not re.search(r"\[R=|differs|not in the cache", out + err)
    assert main([*command, "--spec-tokens", "1", "-v"]) == 0
    out, err = capsys.readouterr()
    assert "the nearest entry differs in options.spec_tokens: 2 -> 1" in err
    assert re.search(r"2/2 lower decode\[R=1,Q=2,K=1\]", err)
    assert re.search(r"replays of decode\[R=1,Q=2,K=1\]", out)


@pytest.fixture
def comparing(word_model) -> list[str]:
    return ["run", str(word_model), *SMALL, "--ids", "3 4", "-n", "8", "--compare"]


@pytest.mark.slow
def test_a_comparison_as_json(comparing, capsys):
    assert main([*comparing, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["tokens_per_s"]) == {"drafted", "plain"}


def test_run_compares_with_plain_decoding(comparing, capsys):
    """When asked, how many times faster the drafts are: two speeds and their ratio."""
    assert main(comparing) == 0
    row = re.search(
        r"speed over K = 0 +(\d+\.\d\d)x: (\d+\.\d) and (\d+\.\d) tok", capsys.readouterr().out
    )
    times, drafted, plain = map(float, row.groups())
    assert times == pytest.approx(drafted / plain, rel=0.01, abs=0.006)  # Two decimals.
    assert main([*comparing, "--spec-tokens", "0"]) == 2
    assert "--compare compares drafts with K = 0, and K is 0" in capsys.readouterr().err


def test_run_without_drafts_has_no_acceptance(word_model, capsys):
    plain = ["--backend", "eager", "--max-len", "64", "--spec-tokens", "0"]
    assert main(["run", str(word_model), *plain, "--ids", "3 4", "-n", "1"]) == 0
    out = capsys.readouterr().out
    assert "acceptance" not in out
    assert re.search(r"new tokens +1, 0 of them", out)


# -------------------------------------------------------------------------------- inspect


def inspect(checkpoint: Path, capsys, *arguments: str) -> str:
    """What `mtpc inspect` prints."""
    assert main(["inspect", str(checkpoint), *SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_inspect_draws_what_users_run(word_model, cpu_cache, capsys, tmp_path, monkeypatch):
    """On the backend of `mtpc run`, whose steps leave sizes open; and the picture of README."""
    monkeypatch.setenv("MTPC_CACHE_DIR", str(cpu_cache))
    drawn = []
    for words in ([str(word_model), "--phase", "prefill"], []):
        path = tmp_path / f"{len(drawn)}.svg"
        assert main(["inspect", *words, "--svg", str(path)]) == 0
        assert "nodes, for backend cpu" in capsys.readouterr().out
        texts = [t.text for t in ElementTree.parse(path).iter() if t.tag.endswith("text")]
        assert not [text for text in texts if re.search(r"\bs\d+\b|u\d+\b", text)]
        drawn.append(texts)
    shown = [
        t.text for t in ElementTree.parse(ROOT / "docs/step.svg").iter() if t.tag.endswith("text")
    ]
    # Title and caption: the step, and after which pass. Node counts depend on the processor.
    assert shown[0].split(":")[0] == drawn[-1][0].split(":")[0] == "decode[R=1,Q=4,K=3]"
    assert shown[1] == drawn[-1][1] == "after legalise-cpu, demo"


def test_inspect_before_and_after_resize_metadata(word_model, capsys):
    before = inspect(word_model, capsys, "--before", "resize-metadata")
    after = inspect(word_model, capsys, "--after", "resize-metadata")
    assert re.search(r"batch.slot_mapping +\[R\] .*\[1\] 8 B .*\[8\] 64 B", before)
    assert re.search(r"batch.slot_mapping +\[R\*Q\] .*\[3\] 24 B .*\[24\] 192 B", after)
    assert re.search(r"resize-metadata +2 ", after)
    assert "resize-metadata" not in before
    assert "fuse-draft-chain  " not in after


def test_inspect_shows_counts_effects_and_a_drawing(word_model, capsys, tmp_path):
    path = tmp_path / "step.svg"
    out = inspect(word_model, capsys, "--nodes", "--batch", "2", "--svg", str(path))
    nodes = int(re.search(r"decode\[R=2,Q=3,K=2\] after \S+: (\d+) nodes", out)[1])
    assert [int(n) for n in re.findall(r"^ +total +(\d+) +$", out, re.M)] == [nodes, nodes]
    history = re.findall(r"^ +[a-z-]+ +\d+ +\d+\.\d{3} +(\d+) +(\d+)", out, re.M)
    assert [after for _, after in history][:-1] == [before for before, _ in history][1:]
    assert int(history[-1][1]) == nodes
    assert "= get_attr batch.slot_mapping" in out
    assert re.search(r"kv\.2\.k +w r w r +mtpc.write_cache in drafts.0 x 2", out)
    assert re.search(r"kv\.0-2\.k +\[N, P, 2, 16\].* x 3 ", out)
    texts = {t.text for t in ElementTree.parse(path).iter() if t.tag.endswith("text")}
    assert {"VERIFY", "PROPOSE", "ADVANCE", "begin", "target", "head", "accept"} <= texts
    assert {"draft 1: MTP layer 0", "draft 2: MTP layer 0", "advance", "kv.0-1.k"} <= texts
    assert "float32[6, 64], 1.5 KiB" in texts  # the features that the head takes in
    assert sum(text.endswith(f", {word_model.name}") for text in texts) == 1
    assert not any(str(word_model) in text for text in texts), "a drawing shows no path"


def test_inspect_says_what_a_request_costs(word_model, capsys):
    """K and V of two layers and the MTP layer, two heads of 16 in float32; rows by request slot."""
    out = inspect(word_model, capsys, "--before", "resize-metadata", "--no-sampling")
    config = json.loads((word_model / "config.json").read_text())
    layers = config["num_hidden_layers"] + config["num_nextn_predict_layers"]
    width = config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    token = layers * 2 * width * 4
    slots = re.search(r"state.block_table .*\[\d+, (\d+)\] \d", out)
    assert slots is not None
    request = 4 * int(slots[1]) + 4 + 8 * 3 + 4 + 8 * 8
    assert f"A request costs {format_bytes(request)}, whatever its length, and " in out
    assert f"{format_bytes(token)} per token, in pages of " in out


def test_inspect_a_prefill_step(word_model, capsys):
    out = inspect(
        word_model, capsys, "--phase", "prefill", "--batch", "4", "--after", "fuse-draft-chain"
    )
    assert "prefill[R=4,Q=16,K=2] after fuse-draft-chain" in out
    assert re.search(r"batch.prompt_ids +\[R\*Q\] +int64 +0 +host +\[64\] 512 B", out)


def test_inspect_the_step_of_a_rank(word_model, capsys):
    """Half of the heads in its caches, fewer bytes of weights, and exchanges between ranks."""
    found = []
    for size in ("1", "2"):
        after = ("--after", "shard", *["--enable-pass", "shard"] * (size == "1"))
        out = inspect(word_model, capsys, *after, "--tensor-parallel-size", size)
        assert (", rank 0 of 2" in out.splitlines()[0]) == (size == "2")
        assert ("mtpc.all_reduce" in out) == (size == "2")
        heads = re.search(r"kv\.\S+\.k +\[N, P, (\d+), ", out)
        weights = re.search(r"Weights.*?total +\d+ +([\d.]+) KiB", out, re.DOTALL)
        assert heads is not None
        assert weights is not None
        found.append((int(heads[1]), float(weights[1])))
    (heads, nbytes), (own_heads, own_nbytes) = found
    assert own_heads * 2 == heads
    assert 0.4 * nbytes < own_nbytes < 0.7 * nbytes


# --------------------------------------------------------------------------------- doctor


@pytest.fixture
def install(monkeypatch):
    """Has the doctor find these distributions only (`_` for `-`)."""

    def install(**versions: str) -> None:
        monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name.replace("-", "_")))

    return install


def test_doctor_finds_this_machine_fit(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"^ok +torch +{re.escape(metadata.version('torch'))}$", out, re.M)
    assert out.endswith("can run here\n")
    for row in (
        "python",
        "transformers",
        "C++ compiler",
        "C++ kernels",
        "CPU",
        "GPU",
        "triton",
        "GPU kernels",
    ):
        assert re.search(rf"^(ok|optional) +{re.escape(row)} ", out, re.M)


def test_doctor_tells_amd_aiter_from_its_namesake(install):
    install(amd_aiter="0.1.7")
    assert doctor.check_aiter().found == "amd-aiter 0.1.7"
    install(amd_aiter="0.1.7", aiter="0.13")
    both = doctor.check_aiter()
    assert both.status == "optional"
    assert both.found == "amd-aiter 0.1.7, and aiter 0.13 of the same import name"
    assert both.advice.startswith("uninstall both")
    install(aiter="0.13.20")
    namesake = doctor.check_aiter()
    assert namesake.status == "optional"
    assert "aiter 0.13.20 is the async-iterator helpers" in namesake.found
    assert "pip uninstall aiter" in namesake.advice
    install()
    assert doctor.check_aiter().found == "amd-aiter is not installed"


@pytest.mark.parametrize("name", ["triton", "triton_rocm", "pytorch_triton_rocm"])
def test_doctor_knows_every_name_of_triton(name, install, monkeypatch):
    monkeypatch.setattr(doctor, "import_module", lambda name: None)
    install(**{name: "3.6.0"})
    found = doctor.check_triton()
    assert (found.status, found.found) == ("ok", f"{name.replace('_', '-')} 3.6.0")


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.10.1", "wrong"), ("2.11.0+cpu", "ok"), ("2.15.0", "ok"), ("2.16.0a0", "wrong")],
)
def test_doctor_holds_versions_to_their_range(version, status, install):
    install(torch=version)
    finding = doctor.check_distribution("torch")
    assert finding.status == status
    assert bool(finding.advice) == (status == "wrong")


def test_doctor_without_torch_says_how_to_get_it(install):
    install()
    findings = {finding.what: finding for finding in doctor.examine()}
    assert findings["torch"].status == "wrong"
    assert findings["torch"].advice == 'pip install "torch>=2.11,<2.16"'
    assert "GPU" not in findings


def test_doctor_knows_the_requirements_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    checked = {}
    for name, (low, high) in doctor.RANGES.items():
        bounds = f">={doctor._dotted(low)}" + (f",<{doctor._dotted(high)}" if high else "")
        checked[name] = Requirement(name + bounds).specifier
    assert checked == wanted
    assert project["requires-python"] == f">={doctor._dotted(doctor.PYTHON)}"


# ----------------------------------------------------------------------- errors, interrupts


@pytest.mark.parametrize("command", ["run", "chat", "serve", "bench", "build", "eval", "check"])
def test_help_shows_few_options_and_help_all_every_one(command, capsys):
    """What is left out of one is in the other, and still parsed."""
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            main([command, flag])
        assert end.value.code == 0
        out = capsys.readouterr().out
        shown[flag] = set(re.findall(r"(?m)^  (?:-\w(?: \S+)?, )?(--[a-z0-9-]+)", out))
    parser = parse([command, *(["--task", "x"] if command == "eval" else [])]).parser
    named = {n for a in parser._actions for n in a.option_strings[:2] if n.startswith("--")}
    assert shown["--help"] < shown["--help-all"] <= named
    assert len(named - shown["--help-all"]) <= 8, "other names of options"
    assert {"--spec-tokens", "--max-len", "--help-all"} <= shown["--help"]
    assert {"--page-size", "--threads"} <= shown["--help-all"] - shown["--help"]
    if command == "run":
        assert 12 <= len(shown["--help"]) <= 18


def test_help_and_import_are_light():
    code = (
        "import sys, mtpc\n"
        "from mtpc.cli.main import main\n"
        "for words in (['--help'], ['run', '--help'], ['inspect', '--help'], ['--version']):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "print('heavy:', sorted({'torch', 'transformers', 'rich', 'numpy'} & set(sys.modules)))\n"
    )
    out = run_python(code)
    assert out.endswith(f"mtpc {mtpc.__version__}\nheavy: []\n")
    assert "--spec-tokens" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "/no/such/checkpoint"], "'/no/such/checkpoint' is not a directory"),
        (["chat", "/no/such/checkpoint"], "'/no/such/checkpoint' is not a directory"),
        (["serve", "/no/such/checkpoint"], "'/no/such/checkpoint' is not a directory"),
        (["run", "{bare}"], "has no tokenizer.json; give prompts as token ids"),
        (["run", "{nothing}"], "has no config.json; expected a checkpoint's directory"),
        (["serve", "{nothing}"], "has no config.json; expected a checkpoint's directory"),
        (["chat", "{nothing}"], "has no config.json; expected a checkpoint's directory"),
        (["run", "{bare}", "--ids", "1"], "holds no *.safetensors"),
        (
            ["run", "{good}", "--spec-tokens", "17"],
            "spec_tokens is 17; expected an integer in 0..16",
        ),
        (["run", "{good}", "--backend", "eagre"], "unknown backend 'eagre'; did you mean 'eager'?"),
        (
            ["run", "{good}", "--ids", "1", "--top-k", "3", "--no-sampling"],
            "--top-k with --no-sampling; leave out one",
        ),
        (["inspect", "{good}", "--after", "resize-metdata"], "did you mean 'resize-metadata'?"),
        (["inspect", "{good}", "--after", "merge-projections"], "add --enable-pass merge-proj"),
        (["inspect", "{good}", "--batch", "0"], "--batch is 0; expected an integer >= 1"),
        (["inspect", "{good}", "--svg", "/no/such/x.svg"], "there is no directory /no/such"),
    ],
)
def test_a_known_error_is_one_line(arguments, message, word_model, capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["MiMoForCausalLM"]}')
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    words = [word.format(bare=tmp_path, good=word_model, nothing=nothing) for word in arguments]
    assert main(words) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("[")]
    assert out == ""
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "did you mean run?"),
        (["run", "--spec-token", "3"], "unrecognized arguments: --spec-token; did you mean --spec"),
        (["run", "--port", "x"], "did you mean --prompt? (mtpc run --help says more)"),
        (["serve", "--port", "x"], "argument --port: 'x' is invalid; expected an integer"),
        (["run", "--temperature", "hot"], "'hot' is invalid; expected a number"),
        (["run", "--ids", "1 x"], "--ids: '1 x' is invalid; expected integers such as 1,2,3"),
        (["run", "-n", "0"], "--max-new-tokens: '0' is invalid; expected an integer >= 1"),
        (
            ["run", "--threads", "1025"],
            "--threads: '1025' is invalid; expected an integer in 1..1024",
        ),
        (["inspect", "--phase", "decod"], "did you mean decode?"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_usage_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def test_traceback_on_request(capsys):
    assert main(["run", "/no/such/checkpoint", "--backend", "eager", "--traceback"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_interrupt_ends_quietly(word_model):
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from mtpc.cli.main import main\n"
        f"sys.exit(main(['run', {str(word_model)!r}, *{SMALL!r}, '--ids', '1 2', '-v']))\n"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert any("trace model" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


# ------------------------------------------------------------------------ progress, numbers


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_file_is_one_line_a_stage():
    stream = io.StringIO()
    with show_progress(stream) as tell:
        tell("trace model")
        tell("1/2 lower decode[R=1]")
    lines = [line.split("] ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines[:2] == ["trace model", "1/2 lower decode[R=1]"]
    assert len(lines) == 3
    assert lines[2].startswith("done in ")


class Cell:
    """What a notebook shows of IPython's display, and the module that gives it."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.config = {"IPKernelApp": {}}
        self.display = SimpleNamespace(display=lambda data, raw, display_id: self)

    def get_ipython(self) -> Cell:
        return self

    def update(self, data: dict[str, str], raw: bool) -> None:
        self.texts.append(data["text/plain"])


HALF = Progress("lower", StepKey.decode(1, 1), 1, 3, 4.25, 0.5, 75.0)
LINE = "2/3 lower decode[R=1,Q=2,K=1]"
BRIEF = "compiling (first time, about 1:15)"


def test_the_api_logs_its_stages(caplog):
    """One line a stage, however often it says how far the stage is."""
    with caplog.at_level(logging.INFO, "mtpc"), show_compiling(None) as listener:
        for _ in range(3):
            listener(HALF)
        listener(Progress("done", None, 3, 3, 9.0))
    assert caplog.messages == [f"{LINE} (50%, 1:15 left)"]


def test_the_api_shows_its_stages_on_a_terminal(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with show_compiling(None) as listener:
        listener(HALF)
        listener(HALF)
        time.sleep(0.3)
        listener(Progress("load", StepKey.decode(1, 1), 2, 3, 5.0))
    listener(Progress("K = 1 was bound", None, 0, 0, 6.0))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "50%, 1:15 left" in text
    assert re.search(rf"\d\.\d s  {re.escape(BRIEF)}\n", text)
    assert LINE not in text
    assert "done in " in text
    assert text.endswith("K = 1 was bound\n"), "another thread says it after the end"


def test_the_api_shows_its_stages_in_a_notebook(monkeypatch):
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", cell)
    with show_compiling(None) as listener:
        listener(HALF)
        listener(HALF)
    assert re.fullmatch(rf"0\.\d s  {re.escape(BRIEF)}", cell.texts[0])
    assert re.fullmatch(
        rf"0\.\d s  █{{10}}░{{10}}  50%, 1:15 left  {re.escape(BRIEF)}", cell.texts[1]
    )
    assert "done in " in cell.texts[2]


def test_the_api_says_nothing_elsewhere(capfd):
    with show_compiling(None) as listener:
        listener(HALF)
    assert capfd.readouterr() == ("", "")


def test_a_caller_s_listener_hears_everything():
    heard = []
    with show_compiling(heard.append) as listener:
        listener(HALF)
    assert heard == [HALF]


def test_progress_on_a_terminal_leaves_a_line_per_stage():
    stream = Terminal()
    with show_progress(stream) as tell:
        tell("trace model")
        tell("1/2 lower decode[R=1]")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert re.search(r"\d\.\d s  trace model", text)
    assert re.search(r"\d\.\d s  1/2 lower decode\[R=1\]", text)
    assert "done in " in text


def test_quantities():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == [
        *("0 B", "1023 B", "1.5 KiB", "3.0 GiB")
    ]
    assert number_ranges({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"


@pytest.mark.parametrize(
    "given",
    [
        {"spec_tokens": 3},
        {"frozen": True},
        {"require_sha256": "0" * 64},
        {"use_cache": False},
        {"backend": "eager"},
        {"backend": "cuda"},
    ],
)
def test_a_server_keeps_to_one_k_where_nothing_is_built_apart(given: dict[str, object]) -> None:
    assert adaptive(given) == {}


def test_a_server_adapts_k_by_default() -> None:
    assert adaptive({"spec_tokens": "auto"})["build_in_background"]
    options = make_plan(mtpc.CompileOptions.parse(adaptive({"backend": "cpu"})))
    assert options.tiers == (0, 1, 2, 3)
    assert options.build_in_background


def test_options_of_several_numbers_are_numbers() -> None:
    """Each option that takes numbers with commas between them: `CompileOptions` checks the rest."""
    found = []
    for name, said in declared(mtpc.CompileOptions):
        if "," in said.metavar and set(said.metavar) <= {*"KNR,"}:
            for text, numbers in (("1", (1,)), ("1,2", (1, 2))):
                args = parse(["run", "DIR", *said.flags(name)[:1], text])
                assert said.check(name, getattr(args, name)) == numbers, name
            found.append(name)
    assert {"batch_buckets", "spec_tiers", "row_budgets"} <= {*found}
