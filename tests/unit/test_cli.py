"""The command line as a user meets it: answers, exit codes, and the text of every error."""

import json
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from flexcp.cli import VERBS, _load, main
from flexcp.cli.inputs import read_inputs
from flexcp.core.errors import RunError
from flexcp.planner import POLICIES

LENGTHS = Path(__file__).parents[1] / "data" / "python_source_lengths_qwen.json"
GOLDEN = Path(__file__).parents[1] / "golden"
PLAN = ["plan", "--model", "qwen3-8b", "--hardware", "h100", "--ranks", "8"]


@pytest.fixture
def lengths(tmp_path):
    """Writes a list of lengths and gives its path."""

    def write(values: object) -> str:
        path = tmp_path / "lengths.json"
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return str(path)

    return write


def flat(text: str) -> str:
    """Line breaks depend on the width of the terminal."""
    return " ".join(plain(text).split())


def plain(text: str) -> str:
    """Without colours, which continuous integration may force."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize(
    ("values", "options", "cause", "remedy"),
    [
        (
            [100, 70_000],
            ["--tokens-per-rank", "8192"],
            "sample 1 has 70000 tokens; 8 ranks x 8192 tokens hold 65536",
            "It fits on 9 ranks of this size; or raise the tokens per rank to 8750, or leave the sample out.",
        ),
        ([100], ["--model", "qwen3-8"], "unknown model 'qwen3-8'", "Did you mean 'qwen3-8b'?"),
        ([100], ["--hardware", "h10"], "unknown hardware 'h10'", "Did you mean 'h100'?"),
        ([100], ["--policy", "flexcpp"], "unknown policy 'flexcpp'", "Did you mean 'flexcp'?"),
        ("", [], "lengths.json is empty", "Give at least one length."),
        ([], [], "lengths.json holds no lengths", "Give at least one length."),
        ([5, -3], [], "lengths.json, entry 1: -3 is not a length", "Lengths are whole numbers"),
        ([5, 1.5], [], "lengths.json, entry 1: 1.5 is not a length", "at least 1"),
        ([5], ["--tokens-per-rank", "0"], "tokens_per_rank is 0", "tokens_per_rank is at least 1."),
        ([5], ["--memory", "64G"], "--memory '64G' is not a size", "64GiB"),
        ([5], ["--memory", "0GB"], "--memory '0GB' is not a size", "64GiB"),
        ([5], ["--memory", "-3GB"], "--memory '-3GB' is not a size", "64GiB"),
        ([5], ["--memory", "9" * 400 + "GiB"], "--memory '999", "64GiB"),
        ([5], ["--memory", "1001TB"], "--memory '1001TB' is not a size", "64GiB"),
        ([5], ["--memory", "64gib"], "--memory '64gib' is not a size", "The unit is written GiB."),
        ([5], ["--sharding", ""], "unknown sharding ''", "ddp, zero1, zero2, zero3"),
        ([5], ["--sharding", "zero4"], "unknown sharding 'zero4'", "ddp, zero1, zero2, zero3"),
        (
            [5],
            ["--memory", "64GiB", "--tokens-per-rank", "9"],
            "--tokens-per-rank and --memory are both given",
            "Leave one out",
        ),
        ([5], ["--memory", "20GB"], "18.0 GB usable", "Shard more"),
        ([500], ["--tokens-per-rank", "1"], "8 ranks x 1 tokens hold 8", "It fits on 500 ranks"),
        ([5], ["--hardware", "cpu"], "qwen3-8b leaves no memory for tokens on cpu", "Shard more"),
        ([5], ["--ranks", "0"], "--ranks is 0", "--ranks is at least 1."),
        ([5], ["--global-batch", "0"], "--global-batch is 0", "--global-batch is at least 1."),
        ("[5, NaN]", [], "lengths.json, entry 1: NaN is not a length", "at least 1"),
        ([5, 0], [], "lengths.json, entry 1: 0 is not a length", "at least 1"),
        ([5], ["--mode", "lockstp"], "unknown mode 'lockstp'", "Did you mean 'lockstep'?"),
        ([5], ["--current-cp", "3"], "--current-cp 3 does not divide 8 ranks", "one degree on all ranks"),
        ([5], ["--out", "plan.txt"], "--out plan.txt is neither .json nor .svg", "drawings are .svg."),
        (
            [5],
            ["--column", "tokens"],
            "holds plain numbers and has no column 'tokens'",
            "Leave the column out",
        ),
        ([5], ["--ranks-per-node", "0"], "ranks_per_node is 0", "at least 1."),
        (
            [60_000],
            ["--policy", "flexsp", "--ranks", "6", "--tokens-per-rank", "12000", "--out", "plan.svg"],
            "flexsp has no plan to draw",
            "needs degree 8, the next power of two of 5; there are 6 ranks",
        ),
        ("{}", [], "is a JSON object without histograms of tokens", "Give a JSON list of lengths"),
        ('{"0": {"text_tokens": 3}}', [], "window 0, text_tokens: not a text", "{length: probability, ...}"),
        ('{"0": {"text_tokens": "open(1)"}}', [], "window 0, text_tokens: 'open(1)' is not a dict", "dict"),
        ('{"0": {"text_tokens": "{-3: 0.5}"}}', [], "-3: 0.5 is not a length and its probability", "dict"),
    ],
)
def test_input_errors_say_cause_and_remedy(lengths, capfd, values, options, cause, remedy):
    """Exit code 2, one line of cause, one line of remedy, nothing else."""
    code = main([*PLAN, lengths(values), *options])
    out, err = map(plain, capfd.readouterr())

    assert code == 2
    assert out == ""
    assert [line.split()[0] for line in err.splitlines()] == ["error:", "fix:"]
    assert cause in err
    assert remedy in err


def test_missing_file_suggests_its_neighbour(lengths, capfd):
    """A typing error in a path is met with the nearest name."""
    path = lengths([5])
    code = main([*PLAN, path.replace("lengths", "lenghts")])

    assert code == 2
    assert f"Did you mean {path}?" in flat(capfd.readouterr().err)


def test_unknown_verb_and_option_exit_2(capfd):
    """The parser's own errors have the same code."""
    assert main(["plam"]) == 2
    assert "Did you mean 'plan'?" in flat(capfd.readouterr().err)
    assert main(["plan", "--rank", "3"]) == 2


def test_version_is_shown(capfd):
    """What a bug report starts with."""
    assert main(["--version"]) == 0
    assert capfd.readouterr().out.strip() == f"flexcp {version('flexcp')}"


@pytest.mark.parametrize(
    ("raised", "code"), [(RunError("a rank died", "look at it"), 1), (KeyboardInterrupt(), 130)]
)
def test_other_ends(monkeypatch, capfd, raised, code):
    """A failed run exits 1, an interrupted one 130; neither shows a traceback."""

    def fail() -> None:
        raise raised

    monkeypatch.setattr("flexcp.cli.env.collect", fail)

    assert code == main(["env"])
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((), "interrupted; there is no checkpoint to continue from\n"),
        (("step-00000002", "step-00000004"), "interrupted; --resume continues from {run}/step-00000004\n"),
    ],
)
def test_an_interrupted_run_says_what_is_left(monkeypatch, tmp_path, capfd, made, said):
    """Ctrl-C saves nothing, so what an earlier step saved is named."""
    saved = tmp_path / "run" / "checkpoints"

    def interrupted(*_args: object, **_options: object) -> None:
        for name in made:
            (saved / name).mkdir(parents=True)
            (saved / name / "flexcp.json").write_text("{}", encoding="utf-8")
        raise KeyboardInterrupt

    monkeypatch.setattr("flexcp.runtime.launch.launch", interrupted)
    (tmp_path / "run.toml").write_text(f'[run]\nfolder = "{tmp_path}/run"\n', encoding="utf-8")

    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes what is captured for a terminal

    assert main(["train", str(tmp_path / "run.toml")]) == 130
    shown = capfd.readouterr()
    assert shown.err == said.format(run=saved)
    assert shown.out == "\x1b[?25h\n"  # the rank that hid the cursor is gone


def test_broken_pipe_is_quiet():
    """`flexcp plan … | head -1` ends without complaint."""
    command = f"{sys.executable} -m flexcp plan {LENGTHS} --model qwen3-8b --ranks 64 --json | head -c 10"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)

    assert result.stdout.strip() == '{"schema":'
    assert result.stderr == ""


def test_plan_answers_in_two_seconds():
    """2,500 lengths, 64 ranks, all policies, a fresh interpreter."""
    command = [
        sys.executable,
        "-m",
        "flexcp",
        "plan",
        str(LENGTHS),
        "--model",
        "qwen3-8b",
        "--ranks",
        "64",
    ]
    started = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True)
    spent_s = time.perf_counter() - started

    assert result.returncode == 0, result.stderr
    assert all(name in result.stdout for name in ("static", "paper", "flexcp"))
    assert spent_s < 6  # 2 s by itself; the machine that runs the suite may be busy


def report(capfd, *arguments: str) -> dict:
    """What `--json` prints."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_json_has_the_documented_shape(capfd):
    """Every key of docs/plan_report.md is there, and the numbers hang together."""
    body = report(capfd, *PLAN, str(LENGTHS), "--ranks", "64", "--steps", "2")

    assert list(body) == ["schema", "inputs", "coefficients", "verdict", "baseline", "policies"]
    assert body["schema"] == "flexcp.plan-report/2"
    assert body["inputs"]["samples"] == 2500
    assert body["inputs"]["steps"] == 2
    assert set(POLICIES) == set(body["policies"])
    assert list(body["policies"])[-1] == "flexcp"
    for policy in body["policies"].values():
        if "refusal" in policy:
            assert set(policy) == {"refusal"}
            continue
        assert set(policy) == {
            *("step_s", "bound_s", "gap", "speed", "plan_ms", "waves", "degrees", "idle_share", "steps"),
            "communication_share",
        }
        assert policy["gap"] == pytest.approx(policy["step_s"] / policy["bound_s"])
        assert policy["gap"] >= 1
        assert len(policy["steps"]) == 2


def test_seed_decides_which_samples_are_drawn(capfd):
    """Same seed, same plans; another seed, other plans."""
    arguments = [*PLAN, str(LENGTHS), "--ranks", "64", "--policy", "flexcp"]
    first, again, other = (
        report(capfd, *arguments, "--seed", seed)["policies"]["flexcp"]["steps"] for seed in ("1", "1", "2")
    )

    assert first[0]["digest"] == again[0]["digest"] != other[0]["digest"]


def test_out_writes_every_task(lengths, tmp_path, capfd):
    """Each sample is in exactly one task of each policy; times can be added up by hand."""
    values = [40_000, 300, 2_000, 9_000, 100, 1]
    out, svg = tmp_path / "plan.json", tmp_path / "plan.svg"
    code = main([*PLAN, lengths(values), "--tokens-per-rank", "8192", "--out", str(out), "--out", str(svg)])
    body = json.loads(out.read_text())

    assert code == 0, capfd.readouterr().err
    assert svg.read_text().startswith("<svg")
    for policy in body["policies"].values():
        if "refusal" in policy:
            continue
        tasks = policy["steps"][0]["tasks"]
        placed = {i: t for task in tasks for i, t in zip(task["samples"], task["tokens"], strict=True)}
        assert dict(enumerate(values)) == placed
        assert {"samples", "tokens", "pairs", "ranks", "wave", "start_s", "end_s", "exchange"} == set(
            tasks[0]
        )
        assert policy["step_s"] == max(task["end_s"] for task in tasks)


def test_tokens_per_rank_comes_from_memory(lengths, capfd):
    """Without the option E follows from model, device and ranks."""
    body = report(capfd, *PLAN, lengths([100] * 16), "--ranks", "64")

    assert body["inputs"]["tokens_per_rank"] > 4096


def test_memory_gives_tokens_per_rank(lengths, capfd):
    """More memory and more sharding hold more tokens; a note says how it came about."""

    def tokens(*options):
        inputs = report(capfd, *PLAN, lengths([100] * 16), "--ranks", "64", *options)["inputs"]
        assert f"{inputs['tokens_per_rank']:,} tokens a rank from" in inputs["notices"][0]
        return inputs["tokens_per_rank"]

    given = tokens("--memory", "80GB")
    assert given == tokens()  # an h100
    assert tokens("--memory", "80 GiB") > given
    assert tokens("--sharding", "zero3") > tokens("--sharding", "zero2") > given


def test_equal_lengths_are_not_worth_it(lengths, capfd):
    """Where nothing can be gained the verdict says so."""
    body = report(capfd, *PLAN, lengths([2048] * 64))

    assert body["verdict"].startswith("Not worth adopting here")


def test_long_tail_is_worth_it(capfd):
    """The real long tail has a verdict with a number."""
    body = report(capfd, *PLAN, str(LENGTHS), "--ranks", "64", "--tokens-per-rank", "8192")

    assert re.match(r"flexcp takes .* the speed of the best static layout", body["verdict"])
    assert body["policies"]["flexcp"]["speed"] > 1.03


def test_current_cp_is_the_baseline(lengths, capfd):
    """The layout in use, not the best one, is what the user would change."""
    body = report(
        capfd,
        *PLAN,
        lengths([30_000, 500, 500, 700, 4_000]),
        "--current-cp",
        "4",
        "--tokens-per-rank",
        "8192",
    )

    assert body["baseline"] == "static cp=4"
    assert body["policies"]["static cp=4"]["speed"] == 1
    assert {"4"} == set(body["policies"]["static cp=4"]["degrees"])


def test_a_layout_that_cannot_serve_says_why(lengths, capfd):
    """Degree 2 of 8192 tokens a rank does not hold 30,000."""
    arguments = [*PLAN, lengths([30_000, 500]), "--current-cp", "2", "--tokens-per-rank", "8192"]
    refusal = report(capfd, *arguments)["policies"]["static cp=2"]["refusal"]

    assert "30000" in refusal
    assert main(arguments) == 0
    assert "cannot serve" in flat(capfd.readouterr().out)


def by_hand_s(task: dict, body: dict) -> float:
    """The formula of docs/plan_report.md, from the JSON alone."""
    c, given = body["coefficients"], body["inputs"]
    d, tokens = len(task["ranks"]), sum(task["tokens"])
    whole = [length for length in task["tokens"] if length < given["whole_below_tokens"]]
    cut = [length for length in task["tokens"] if length >= given["whole_below_tokens"]]
    nodes = {rank // given["ranks_per_node"] for rank in task["ranks"]}
    link = c["inter"] if len(nodes) > 1 else c["intra"]
    longest = max(whole, default=0)
    steps = (d - 1) * bool(cut)
    attention = c["pair_s"] * max(task["pairs"] / d, longest * (longest + 1) / 2)
    linear = c["token_s"] * max(tokens / d, longest)
    blocks = {"ring": d, "gather": min(d, 2), "all-to-all": 1}[task["exchange"]]
    handling = c["sample_s"] * (max(len(whole) / d, bool(whole)) + blocks * len(cut))
    latency = c["layers"] * c["passes"] * link["latency_s"]
    message = c["kv_bytes_per_token"] * sum(cut) / d / link["bytes_per_s"]
    if task["exchange"] == "ring":
        exposed = max(attention, steps * (message + latency)) + steps * c["ring_step_s"]
    elif task["exchange"] == "gather":
        own = attention / d
        exposed = attention - own + max(own, steps * message + bool(steps) * latency)
        exposed += bool(steps) * c["ring_step_s"]
    else:
        sent = c["head_bytes_per_token"] * (2 * c["heads"] + 2 * max(c["kv_heads"], d)) * sum(cut) / d
        exposed = attention + sent * steps / d / link["bytes_per_s"] + bool(steps) * 2 * latency
    return exposed + linear + handling + c["pack_s"]


@pytest.mark.parametrize("mode", ["free-running", "lockstep"])
def test_every_time_can_be_computed_by_hand(tmp_path, capfd, mode):
    """The JSON and the formula of its page are enough; so are starts and ends, in either mode."""
    out = tmp_path / "plan.json"
    arguments = ["--ranks", "20", "--tokens-per-rank", "8192", "--global-batch", "200", "--mode", mode]
    assert main([*PLAN, str(LENGTHS), *arguments, "--out", str(out)]) == 0
    body = json.loads(out.read_text())
    served = {name: policy for name, policy in body["policies"].items() if "steps" in policy}

    assert {"flexcp", "paper", "static", "megatron-dynamic"} <= set(served)
    for policy in served.values():
        tasks = policy["steps"][0]["tasks"]
        for task in tasks:
            assert task["end_s"] - task["start_s"] == pytest.approx(by_hand_s(task, body))
        free_s = dict.fromkeys(range(20), 0.0)
        for task in tasks:
            if mode == "free-running":
                assert task["start_s"] == max(free_s[rank] for rank in task["ranks"])
            for rank in task["ranks"]:
                assert task["start_s"] >= free_s[rank]
                free_s[rank] = task["end_s"]
        assert max(free_s.values()) == policy["step_s"]


def test_heads_limit_ulysses_and_the_row_says_so(lengths, capfd):
    """D29: a degree that the heads forbid is never proposed; the refusal names both numbers."""
    arguments = [*PLAN, lengths([300_000, 500]), "--tokens-per-rank", "8192", "--ranks", "64"]
    assert main(arguments) == 0
    shown = flat(capfd.readouterr().out)

    assert "ulysses needs degree 37, heads allow 32 (32 query, 8 key/value heads, 64 ranks)" in shown
    assert all(f"\n{name}" in "\n" + shown.replace(" ", "\n") for name in POLICIES)


def test_several_files_of_several_kinds_are_one_list(tmp_path, capfd):
    """JSON with spans, CSV with a named column, JSON lines: numbered through, spans kept."""
    (tmp_path / "a.json").write_text('[700, {"tokens": 900, "spans": [[0, 256]]}]')
    (tmp_path / "b.csv").write_text("id,size\n1,3000\n2,40\n")
    (tmp_path / "c.jsonl").write_text('{"size": 5000}\n')
    given = read_inputs([tmp_path / "b.csv", tmp_path / "c.jsonl"], "size")
    spanned = read_inputs([tmp_path / "a.json"], None)
    out = tmp_path / "plan.json"

    assert given.lengths.tolist() == [3000, 40, 5000]
    assert spanned.sample(1).spans == ((0, 256),)
    assert main([*PLAN, str(tmp_path / "a.json"), str(tmp_path / "a.json"), "--out", str(out)]) == 0
    tasks = json.loads(out.read_text())["policies"]["flexcp"]["steps"][0]["tasks"]
    assert sorted(k for task in tasks for k in task["samples"]) == [0, 1, 2, 3]
    causal = 2 * (700 * 701 // 2 + 900 * 901 // 2)
    assert sum(task["pairs"] for task in tasks) == causal + 2 * (256 * 255 // 2)


def test_servegen_histograms_are_drawn_the_same_every_time(tmp_path, capfd):
    """Windows of probabilities: images first, as spans; empty windows are skipped; the notice says it."""
    path = tmp_path / "image.json"
    columns = {"text_tokens": "{90: 0.5, 110: 0.5}", "image_tokens": "{600: 1.0}", "image_count": "{2: 1.0}"}
    path.write_text(json.dumps({"0": columns, "600": {"text_tokens": "{}", "image_count": "{}"}}))
    one, other = read_inputs([path], None), read_inputs([path], None)

    assert len(one.lengths) == 10_000
    assert (one.lengths == other.lengths).all()
    assert set(one.lengths.tolist()) == {1290, 1310}
    assert one.sample(7).spans == ((0, 600), (600, 1200))
    assert main([*PLAN, str(path)]) == 0
    assert "note: image.json holds probabilities: 10,000 lengths are drawn" in flat(capfd.readouterr().out)


def test_ten_million_lengths_are_answered_from_a_sample(tmp_path, monkeypatch, capfd):
    """A list over the limit still answers, and says that batches are a sample of it."""
    monkeypatch.setattr("flexcp.cli.inputs._MANY", 2000)
    options = ["--ranks", "64", "--policy", "static", "--tokens-per-rank", "8192"]
    body = report(capfd, *PLAN, str(LENGTHS), *options)

    assert body["inputs"]["notices"] == ["2,500 lengths: batches are a random sample of them."]


def test_too_few_samples_are_noticed(lengths, capfd):
    """Steps that cannot be drawn, and a batch that is smaller than asked."""
    arguments = [*PLAN, lengths([500] * 20), "--tokens-per-rank", "8192", "--global-batch", "16"]
    assert main([*arguments, "--steps", "3"]) == 0
    said = "20 lengths are not enough for 3 steps of 16: planned are 2, the last of 4 samples."
    assert said in flat(capfd.readouterr().out)
    assert main(arguments) == 0
    assert "not enough" not in flat(capfd.readouterr().out)


def test_another_policy_that_beats_the_layout_in_use_is_named(capfd):
    """So that its gain is not put down to flexcp alone."""
    body = report(capfd, *PLAN, str(LENGTHS), "--ranks", "64", "--tokens-per-rank", "8192")

    others = {k: v["step_s"] for k, v in body["policies"].items() if k != "flexcp" and v.get("step_s")}
    best = min(others, key=lambda name: others[name])
    named = f"The next best, {best}, takes" in body["verdict"]
    assert named == (1.03 * others[best] < others["static"])


def test_a_last_node_that_is_smaller_is_noticed(lengths, capfd):
    """12 ranks in nodes of 8 are planned as they are."""
    arguments = [*PLAN, lengths([500] * 9), "--tokens-per-rank", "8192"]
    assert main([*arguments, "--ranks", "12"]) == 0
    assert "12 ranks in nodes of 8: the last node has 4." in flat(capfd.readouterr().out)
    assert main([*arguments, "--ranks", "4"]) == 0
    assert "nodes of 8" not in flat(capfd.readouterr().out)


def test_explain_says_why_and_what_else_would_be(lengths, capfd, monkeypatch):
    """Each long sample: its degree, what one rank less or more would do, the reason."""
    monkeypatch.setenv("COLUMNS", "80")
    batch = lengths([50_000, 6_000, 300] * 8)
    assert main([*PLAN, batch, "--ranks", "16", "--tokens-per-rank", "8192", "--explain"]) == 0
    out = plain(capfd.readouterr().out)
    rows = [line for line in out.splitlines() if "50,000" in line]

    assert len(rows) == 8
    change = r"(–|[+-][\d.]+ m?s)"
    reason = "(memory allows no less|less outlasts the step|less delays the next|more is no faster|fits .*)"
    assert all(re.search(rf" 50,000 +\d+ +[\d.]+ s +{change} +{change} +{reason}", row) for row in rows)
    assert "bound is the work of all samples on all ranks" in flat(out).replace("bound, which", "bound")
    assert max(map(len, out.splitlines())) <= 80


def test_plan_says_where_the_numbers_of_the_machine_are_from(lengths, capfd, monkeypatch):
    """How many of which kind in a line; each with its value and source on request."""
    monkeypatch.setenv("COLUMNS", "100")
    arguments = [*PLAN, lengths([5_000, 600] * 8), "--ranks", "8", "--tokens-per-rank", "8192"]
    assert main([*arguments, "--hardware", "a100"]) == 0
    short = flat(plain(capfd.readouterr().out))
    assert main([*arguments, "--hardware", "a100", "--explain"]) == 0
    full = flat(plain(capfd.readouterr().out))

    assert "numbers of a100: 4 published, 4 derived, 4 assumed; --explain names them" in short
    assert "data sheet" not in short
    assert "published: flops_per_s 3.12e+14, memory_bytes 8e+10 (NVIDIA A100 SXM data sheet" in full
    assert "derived: intra_bytes_per_s 2.3e+11 (A100 data sheet, NVLink 300 GB/s one way, times 0.77" in full


def test_lockstep_waits_for_every_wave(capfd):
    """The same lengths take no less in lockstep."""
    arguments = [*PLAN, str(LENGTHS), "--ranks", "64", "--tokens-per-rank", "8192", "--policy", "flexcp"]
    free, lockstep = (report(capfd, *arguments, "--mode", mode) for mode in ("free-running", "lockstep"))

    assert free["inputs"]["mode"] == "free-running"
    step_s = [body["policies"]["flexcp"]["step_s"] for body in (free, lockstep)]
    assert step_s[0] <= step_s[1]


def test_plan_has_few_flags():
    """At most nineteen, each in a group."""
    options = [parameter for parameter in _load("plan").params if parameter.opts[0].startswith("-")]

    assert len([option for option in options if option.name != "help"]) <= 19
    assert all(option.rich_help_panel for option in options if option.name != "help")


def test_env_lists_what_is_missing(capfd, monkeypatch):
    """A package that is not there is named with the command that installs it."""
    facts = {
        "python": "3.11.0",
        "packages": {"flexcp": "0.1.0", "torch": None},
        "system": "Linux",
        "cores": 2,
        "memory_bytes": 2**33,
        "accelerator": None,
    }
    monkeypatch.setattr("flexcp.cli.env.collect", lambda: facts)

    assert main(["env"]) == 0
    assert "not installed: pip install 'flexcp[train]'" in flat(capfd.readouterr().out)


def described(verb: str) -> str:
    """Every argument and option of a verb, free of how the help happens to be drawn."""
    command = _load(verb)
    lines = [f"flexcp {verb}: {command.help.splitlines()[0]}"]
    panel = None
    for parameter in command.params:
        if parameter.rich_help_panel != panel:
            panel = parameter.rich_help_panel
            lines.append(f"[{panel}]")
        shown_default = (
            parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
        )
        state = "required" if parameter.required else f"default {shown_default}"
        lines.append(f"  {' '.join(parameter.opts)} ({state}): {parameter.help}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("verb", VERBS)
def test_flags_are_as_agreed(verb):
    """Flags are an interface: a change shows up in tests/golden and is meant (`make golden`)."""
    assert described(verb) == (GOLDEN / f"help_{verb}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_is_drawn(verb, capfd):
    """Every verb explains itself."""
    assert main([verb, "--help"] if verb else ["--help"]) == 0
    assert "Usage: flexcp" in flat(capfd.readouterr().out)


if __name__ == "__main__":
    for name in VERBS:
        (GOLDEN / f"help_{name}.txt").write_text(described(name), encoding="utf-8")
