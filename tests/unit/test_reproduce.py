"""`flexcp reproduce`: rows recomputed on their own, constants of the stated rows only, bad input."""

import json
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from rich.console import Console

from flexcp.cli import main as cli
from flexcp.cli.reproduce import show
from flexcp.core.cluster import Cluster
from flexcp.core.errors import InfeasibleError
from flexcp.core.model_shape import model_shape
from flexcp.core.sample import samples_from_lengths
from flexcp.cost import CostModel, Link, cost_model, hardware
from flexcp.cost.encoder import encoder_pairs
from flexcp.planner import make_plan
from flexcp.reproduce import extreme, main, noise, scaling, schedule
from flexcp.reproduce.fitting import FITTED_MAIN, FITTED_SCHEDULE, Constants, fit_constants
from flexcp.reproduce.layouts import (
    batches_of,
    fair_static,
    heads_filled_up,
    padded_s,
    planned_s,
    row_load,
)
from flexcp.reproduce.published import PUBLISHED
from flexcp.reproduce.result import ExperimentSetup, Result
from flexcp.reproduce.workloads import workload

SETUP = ExperimentSetup(steps=1)
LINK = Link(bytes_per_s=1e4, latency_s=0.0)
# 2 us a pair, 1 ms a token, 5 ms a sample, 0.1 s a pack, 20 ms a ring step; messages 0.1 ms a token.
COST = CostModel(2e-6, 1e-3, 5e-3, 0.1, 0.02, 1.0, 1, LINK, LINK, heads=6, kv_heads=2)


@pytest.fixture(scope="module")
def constants():
    return fit_constants(PUBLISHED, SETUP.steps, SETUP.seed)


def perturbed(published=PUBLISHED):
    """All published numbers that nothing is fitted on, changed."""
    rows = [
        replace(
            row,
            fcp_s=row.fcp_s if FITTED_MAIN.get(row.data) == row.model else 3 * row.fcp_s,
            baseline_s=2 * row.baseline_s,
            ratio=2 * row.ratio,
        )
        for row in published.main
    ]
    planned = [
        row if (row.global_batch, row.ranks) in FITTED_SCHEDULE else replace(row, compute_s=9.0)
        for row in published.schedule
    ]
    planned = [replace(row, schedule_ms=1.0, solver_ms=1.0) for row in planned]
    scaled = [
        replace(
            row,
            megatron=0.1,
            fcp_over_deepspeed=9.0,
            deepspeed=row.deepspeed if row.ranks == 8 else 0.1,
        )
        for row in published.scaling
    ]
    return replace(
        published,
        main=tuple(rows),
        schedule=tuple(planned),
        scaling=tuple(scaled),
        extreme_ratio=9.0,
        released=(),
    )


def test_constants_lean_on_stated_rows_only(constants):
    """Change every other published number: no constant moves."""
    assert fit_constants(perturbed(), SETUP.steps, SETUP.seed) == constants


@pytest.mark.parametrize("table", ["main", "schedule", "scaling"])
def test_constants_lean_on_stated_rows(table, constants):
    """Change a stated row: some constant does."""
    first = {
        "main": replace(PUBLISHED.main[0], fcp_s=14.0),
        "schedule": replace(PUBLISHED.schedule[0], compute_s=7.0),
        "scaling": replace(PUBLISHED.scaling[0], deepspeed=1.9),
    }[table]
    changed = replace(PUBLISHED, **{table: (first, *getattr(PUBLISHED, table)[1:])})

    assert fit_constants(changed, SETUP.steps, SETUP.seed) != constants


def test_predictions_do_not_look_at_what_they_predict():
    """Our columns of the main table are the same whatever the predicted rows claim."""
    ours = ("paper_s", "padded_s", "fair_s", "flexcp_s", "unattended_over_paper")
    tables = [
        main.run(ExperimentSetup(1, 0, published)).tables[1].rows for published in (PUBLISHED, perturbed())
    ]

    for row, other in zip(*tables, strict=True):
        assert [row[key] for key in ours] == [other[key] for key in ours]
        assert row["published_ratio"] != other["published_ratio"]


def test_fitted_rows_are_met_and_marked():
    """Every fitted row is met to 1.5 %, and marked; those of the schedule to 1 %.

    One batch is a coarse one: planned seconds jump by a wave here and there. The page has eight.
    """
    compared = schedule.run(SETUP).tables[0]
    marked = {(compared.rows[row]["global_batch"], compared.rows[row]["ranks"]) for row, _ in compared.fitted}
    fcp = main.run(SETUP).tables[0]
    named = {(fcp.rows[row]["data"], fcp.rows[row]["model"]) for row, _ in fcp.fitted}

    assert marked == set(FITTED_SCHEDULE)
    assert named == set(FITTED_MAIN.items())
    assert all(abs(compared.rows[row]["off"]) < 0.01 for row, _ in compared.fitted)
    assert all(abs(fcp.rows[row]["fcp_off"]) < 0.015 for row, _ in fcp.fitted)
    rates = scaling.run(SETUP).tables[0]
    speed = {(rates.rows[row]["ranks"], rates.rows[row]["system"], key) for row, key in rates.fitted}
    assert speed == {(8, "DeepSpeed, padded", "same"), (8, "DeepSpeed, padded", "growing")}
    assert all(abs(rates.rows[row][f"{key}_off"]) < 0.015 for row, key in rates.fitted)


def test_wikipedia_row_on_its_own(constants):
    """The row whose lengths are known, from the planner up: no scale, the fitted speed, the fixed seconds."""
    row = next(row for row in main.run(SETUP).tables[2].rows if row["data"] == "wikipedia")
    shares = np.random.default_rng(0).random((1, 512))
    batch = samples_from_lengths(workload("wikipedia").tokens(shares[0]).tolist())
    cost = cost_model(model_shape("llama3.2-1b"), hardware("ascend-910c"), speed=constants.speed)
    paper, flexcp = (
        make_plan(batch, Cluster(64, 8192, 16), cost, policy=policy, mode=mode).step_s + constants.fixed_s
        for policy, mode in (("paper", "lockstep"), ("flexcp", "free-running"))
    )

    assert (row["paper_s"], row["flexcp_s"]) == pytest.approx((paper, flexcp), rel=1e-12)
    assert row["paper_over_flexcp"] == pytest.approx(paper / flexcp, rel=1e-12)
    assert row["fair_degree"] == 16


@pytest.mark.parametrize("attended", [True, False])
def test_padded_layout_by_hand(attended):
    """4 ranks of 100 tokens, context 200: two replicas of degree 2; the first has 150 and 120, two rows."""
    batch = samples_from_lengths([150, 60, 120])
    measured = padded_s([batch], Cluster(4, 100), COST, "ring", 200, attended=attended)

    def row_s(length, filling):
        pairs = length * (length + 1) / 2 + (filling * (filling + 1) / 2 if attended else 0)
        samples = 2 if attended else 1
        messages_s = 200 / 2 * 1.0 / 1e4
        return max(2e-6 * pairs / 2, messages_s) + 1e-3 * 100 + 2 * 5e-3 * samples + 0.1 + 0.02

    assert measured == pytest.approx(row_s(150, 50) + row_s(120, 80), rel=1e-12)


def test_padded_layout_needs_its_degree():
    with pytest.raises(InfeasibleError, match="rows of 500 tokens need 5 ranks"):
        padded_s([samples_from_lengths([10])], Cluster(4, 100), COST, "ring", 500)


def test_fair_static_layout_by_hand():
    """Four equal samples on four ranks: one each, unless the longest that may come forces degree 2."""
    batch = samples_from_lengths([100] * 4)
    alone = fair_static([batch], Cluster(4, 100), COST, longest=100)
    wider = fair_static([batch], Cluster(4, 100), COST, longest=101)

    assert alone.degree == 1
    assert alone.seconds == pytest.approx(2e-6 * 5050 + 0.1 + 5e-3 + 0.1, rel=1e-12)
    assert wider.degree == 2
    assert wider.seconds > alone.seconds
    with pytest.raises(InfeasibleError, match="401 tokens need 5 ranks"):
        fair_static([batch], Cluster(4, 100), COST, longest=401)


def test_one_degree_for_all_steps():
    """The degree that is best for each step may differ; a run has one."""
    steps = [samples_from_lengths([100] * 4), samples_from_lengths([100])]
    both = fair_static(steps, Cluster(4, 100), COST, longest=100)
    each = [fair_static([step], Cluster(4, 100), COST, longest=100) for step in steps]

    assert len({layout.degree for layout in each}) == 2
    assert both.seconds > fmean(layout.seconds for layout in each)


def test_heads_are_filled_up_where_they_are_exchanged():
    swapped = heads_filled_up(COST.with_exchange("all-to-all"), 4)

    assert (swapped.heads, swapped.pair_s) == (8, pytest.approx(COST.pair_s * 8 / 6))
    assert heads_filled_up(COST.with_exchange("all-to-all"), 3).heads == 6
    assert heads_filled_up(COST, 4) == COST


@pytest.mark.parametrize("policy", ["paper", "flexcp"])
def test_replay_is_the_plan_under_its_own_coefficients(policy):
    """Barriers included: without them the waves of `paper` would end sooner."""
    lengths = np.random.default_rng(0).integers(5, 100, 60).tolist()
    mode = {"paper": "lockstep", "flexcp": "free-running"}[policy]
    plan = make_plan(
        samples_from_lengths([250, *lengths]), Cluster(4, 100, 2), COST, policy=policy, mode=mode
    )
    slower = replace(COST, pair_s=0.02, token_s=0.01)
    without_barriers = noise.replay_s(replace(plan, mode="free-running"), COST)

    assert noise.replay_s(plan, COST) == pytest.approx(plan.step_s, rel=1e-12)
    assert noise.replay_s(plan, slower) > 2 * plan.step_s
    assert (without_barriers < 0.99 * plan.step_s) == (policy == "paper")


def test_no_noise_changes_nothing():
    batches = workload("wikipedia").batches(64, 1, 0)
    found = noise.robustness(batches, Cluster(8, 8192), COST, "paper", 0.0, seed=0)

    assert found == noise.Robustness(1.0, 1.0, *[pytest.approx(0.0, abs=1e-12)] * 3)


def test_noise_keeps_coefficients_positive_and_moves_them_all():
    random = np.random.default_rng(0)
    many = [noise.disturbed(COST, 5.0, random) for _ in range(50)]

    assert all(min(c.pair_s, c.token_s, c.pack_s, c.intra.bytes_per_s, c.inter.bytes_per_s) > 0 for c in many)
    assert all(c.inter.bytes_per_s <= c.intra.bytes_per_s for c in many)
    many = [noise.disturbed(COST, 0.5, random) for _ in range(50)]
    for name in ("pair_s", "token_s", "sample_s", "pack_s", "ring_step_s", "intra", "inter"):
        assert len({getattr(c, name) for c in many}) > 20, name


def test_noise_makes_plans_slower(constants):
    """Under the right coefficients no wrong plan is much better, and more noise is worse."""
    batches = constants.workload("github").batches(512, 1, 0)
    cost = cost_model(model_shape("qwen3-8b"), hardware("ascend-910c"))
    little, much = (
        noise.robustness(batches, Cluster(64, 8192, 16), cost, "flexcp", sigma, seed=0, fixed_s=2.0)
        for sigma in (0.05, 0.5)
    )
    tasks_s = make_plan(batches[0], Cluster(64, 8192, 16), cost).step_s

    assert 0 <= little.slower < much.slower < much.slowest
    assert much.slower_step == pytest.approx(much.slower * tasks_s / (tasks_s + 2.0))


def test_schedule_times_only_the_plan(constants):
    """A clock that ticks once a reading: every plan takes one tick."""
    ticks = iter(range(10_000))
    result = schedule.run(SETUP, clock=lambda: float(next(ticks)))

    assert {row["paper_ms"] for row in result.tables[1].rows} == {1000.0}
    assert next(ticks) == 2 * 2 * len(PUBLISHED.schedule)


def test_scaling_row_on_its_own(constants):
    """FCP on 16 ranks, from the planner up."""
    row = next(r for r in scaling.run(SETUP).tables[0].rows if (r["ranks"], r["system"][:3]) == (16, "FCP"))
    data = constants.workload("github").within(65_536)
    batch = data.batches(64 * 16, 1, 0)[0]
    cost = cost_model(model_shape("qwen3-8b"), hardware("ascend-910c"), speed=constants.speed)
    plan = make_plan(batch, Cluster(16, 8192, 16), cost, policy="paper", mode="lockstep")
    tokens = sum(sample.tokens for sample in batch)

    assert row["growing"] == pytest.approx(tokens / (plan.step_s + constants.fixed_s) / 16e3, rel=1e-12)
    assert row.get("published") is None


def test_extreme_batches():
    """One sample of 128k in each; the released generator has one in about half of its steps."""
    released = extreme.released_batches(0)
    long = [max(sample.tokens for sample in batch) == 131_072 for batch in released]

    assert len(released) == 9
    assert {len(batch) for batch in released} == {64}
    assert 0 < sum(long) < 9
    for batch, has_long in zip(released, long, strict=True):
        rest = sorted(sample.tokens for sample in batch)[:-1]
        assert 3686 <= rest[0] <= rest[-1] <= 4506 if has_long else 512 <= rest[0] <= rest[-1] <= 4096


def test_extreme_row_on_its_own(constants):
    times = extreme.unbalanced(63, SETUP, constants)
    shorts = np.random.default_rng(0).integers(2048, 8192, size=(1, 63), endpoint=True)[0].tolist()
    batch = samples_from_lengths([131_072, *shorts])
    cost = cost_model(model_shape("qwen3-8b"), hardware("ascend-910c"), speed=constants.speed)
    plain = planned_s([batch], Cluster(64, 8192, 16), cost, "flexcp") + constants.fixed_s

    assert times.flexcp == pytest.approx(plain, rel=1e-12)
    assert times.flexcp < times.paper < times.fair < times.padded


def test_command_prints_json_twice_alike(capfd, constants):
    """Same seed, same bytes; the seed reaches the fit and the batches."""
    printed = []
    for _ in range(2):
        assert cli(["reproduce", "noise", "--steps", "1", "--seed", "1", "--json"]) == 0
        printed.append(capfd.readouterr().out)
    body = json.loads(printed[0])

    assert printed[0] == printed[1]
    assert body["seed"] == 1
    assert body["constants"]["scales"] == fit_constants(PUBLISHED, 1, 1).scales != constants.scales
    assert body["schema"] == "flexcp.reproduce/1"
    assert [row["policy"] for row in body["tables"][0]["rows"]] == ["paper", "flexcp"] * 2
    assert set(body["fitted_on"]) == {"speed", "fixed_s", *body["constants"]["scales"]}


def test_command_shows_and_writes(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    files = [tmp_path / "e.json", tmp_path / "e.md"]
    call = ["reproduce", "extreme", "--steps", "1", *(part for f in files for part in ("--out", str(f)))]

    assert cli(call) == 0
    shown = capfd.readouterr().out
    assert "One sample of 131,072" in shown
    assert "DeepSpeed at 8 devices" in " ".join(shown.split())
    assert "2.24" in files[1].read_text(encoding="utf-8")
    assert json.loads(files[0].read_text(encoding="utf-8"))["experiment"] == "extreme"


@pytest.mark.parametrize("number", [0, 1, 2])
def test_words_stay_whole_at_80_columns(capfd, number):
    """Names of models and data, titles, numbers: in no table of up to ten columns one is broken."""
    names = {"model": "internvl3-8b", "data": "commoncrawl", "baseline": "deepspeed"}
    made = main._tables((names, names))[number]  # of the first table the last row is left out
    forms = {".2f": 12.34, "+.1%": -0.123, ",.0f": 2345.0, "d": 16}
    values = {c.key: 1.25 if "×" in c.title else forms[c.form] for c in made.columns if c.key not in names}
    table = replace(made, rows=({**names, **values},))
    cells = {table.cell(0, column) for column in table.columns}

    show(
        Result("main", SETUP, Constants(1.0, 0.0, dict.fromkeys(("schedule", *FITTED_MAIN), 1.0)), (table,)),
        Console(width=80),
    )
    shown = capfd.readouterr().out

    words = {word for column in table.columns for word in column.title.replace("`", "").split()}
    assert words | cells <= set(shown.split())
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["extrem"], "Did you mean 'extreme'"),
        (["main", "--out", "table.html"], "neither .json nor .md"),
        (["main", "--out", "nowhere/table.md"], "does not exist"),
    ],
)
def test_bad_input_says_what_to_do(arguments, says, capfd):
    assert cli(["reproduce", *arguments]) == 2
    assert says in " ".join(capfd.readouterr().err.split())


def test_clips_are_frames_to_a_vision_model():
    """600 tokens are frames of 256, 256 and 88, each with 4 patches a token; text models see plain rows."""
    data = workload("msrvtt").scaled(20.0)
    shape = model_shape("qwen3-vl-8b")
    (seen,), (plain,) = (batches_of(data, model, 64, 1, 0) for model in ("qwen3-vl-8b", "qwen3-8b"))
    clip = next(sample for sample in seen if sample.tokens > 512)
    patches = [1024, 1024, 4 * (clip.tokens - 512)]

    assert [sample.tokens for sample in seen] == [sample.tokens for sample in plain]
    assert clip.encoder_pairs == encoder_pairs(patches, shape, hardware("ascend-910c"))
    assert all(sample.encoder_pairs == 0 for sample in plain)
    assert row_load(seen, 10**5, attended=False).pairs == sum(sample.work_pairs for sample in seen)
