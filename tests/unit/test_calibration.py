"""Calibrations: coefficients come back from noisy times, files come back from JSON, bad input is named."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flexcp.core.errors import InputError
from flexcp.core.model_shape import ModelShape, model_shape
from flexcp.core.sample import Sample
from flexcp.cost import CostModel, Link, Load, cost_model, hardware, memory_model, tokens_per_rank
from flexcp.cost.attention_fit import fit_attention
from flexcp.cost.calibration import (
    CALIBRATION_SCHEMA,
    Calibration,
    Setup,
    fit_calibration,
    hardware_at,
    read_calibration,
)
from flexcp.cost.doubts import doubts
from flexcp.cost.fit import TERMS, fit_link
from flexcp.cost.measurements import (
    COLUMNS,
    AttentionTime,
    Measurement,
    is_attention_table,
    read_attention_times,
    read_measurements,
)

SHAPE = ModelShape("tiny", 4, 128, 4, 2, 32, 384, 512, tied=True)
BYTES_PER_TOKEN = memory_model(SHAPE, 1, element_bytes=4, checkpointing=False).bytes_per_token
SETUP = Setup(
    device="cpu: a test",
    clock="cpu",
    date="2026-01-02",
    versions={"flexcp": "0.0"},
    model=SHAPE,
    checkpointing=False,
    element_bytes=4,
    link=Link(bytes_per_s=2e9, latency_s=1e-4),
    memory_bytes=2**32,
    memory_bytes_per_token=1.25 * BYTES_PER_TOKEN,
)
TRUTH = replace(cost_model(SHAPE, hardware("cpu"), checkpointing=False), intra=SETUP.link, inter=SETUP.link)
ONE_DOCUMENT = Path(__file__).parents[1] / "data" / "distca_attn_one_document.csv"
DISTCA = Path(__file__).parents[2].parent / "shared" / "data" / "distca_attn_dist_multimodal_64k.psv"


PACKS = tuple((tokens, samples) for tokens in (32, 128, 512, 1024, 2048, 4096) for samples in (1, 4))


def tasks(
    cost: CostModel = TRUTH, noise: float = 0.0, seed: int = 0, packs: Sequence[tuple[int, int]] = PACKS
) -> list[Measurement]:
    """Packs of so many tokens and samples x degrees, timed by a formula with Gaussian noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for tokens, samples in packs:
        load = sum([Load.of(Sample(0, tokens // samples), 0)] * samples, Load())
        for degree in (1, 2, 3, 4):
            seconds = cost.task_s(load, degree) * (1 + noise * rng.standard_normal())
            rows.append(Measurement(load, degree, seconds))
    return rows


def test_coefficients_come_back_exactly():
    found = fit_calibration(tasks(), SETUP)
    expected = {term: pytest.approx(getattr(TRUTH, term), rel=1e-6) for term in TERMS}
    assert found.coefficients == expected
    assert found.error_max < 1e-6
    assert found.outliers == ()
    assert (found.tokens, found.longest_tokens, found.degrees) == ((32, 4096), 4096, (1, 2, 3, 4))


@pytest.mark.parametrize("seed", range(3))
def test_coefficients_come_back_from_noise(seed):
    """With 2 % of noise the error of a held-out task is about that, and every term that matters is near."""
    found = fit_calibration(tasks(noise=0.02, seed=seed), SETUP, seed=seed)
    for term in ("pair_s", "token_s", "ring_step_s"):
        assert found.coefficients[term] == pytest.approx(getattr(TRUTH, term), rel=0.15), term
        assert found.spreads[term] < 0.15
    assert found.error_mean < 0.025


def test_coefficients_come_back_where_communication_shows():
    """A slow link: the ring hides attention, not the other way round, and the fit finds out which rows."""
    slow = Link(bytes_per_s=5e7, latency_s=5e-4)
    cost = replace(TRUTH, intra=slow, inter=slow)
    found = fit_calibration(tasks(cost), replace(SETUP, link=slow))
    assert found.coefficients == {term: pytest.approx(getattr(cost, term), rel=1e-4) for term in TERMS}


def test_fitted_model_predicts_tasks_it_has_not_seen():
    cost = fit_calibration(tasks(noise=0.02), SETUP).cost
    load = sum((Load.of(Sample(0, n), 0) for n in (700, 90, 1500)), Load())
    for degree in (1, 2, 3):
        assert cost.task_s(load, degree) == pytest.approx(TRUTH.task_s(load, degree), rel=0.03)


def test_outlier_is_named_and_left_out():
    rows = tasks(noise=0.01)
    rows[17] = replace(rows[17], seconds=rows[17].seconds * 3)
    found = fit_calibration(rows, SETUP)
    assert found.outliers == (str(rows[17]),)
    assert str(rows[17]).startswith("1 sample, 512 tokens, degree 2, ")
    assert found.measurements == len(rows) - 1
    assert found.error_max < 0.1


def test_link_from_messages():
    link = fit_link([1000, 10**6, 4 * 10**6], [1e-4 + 1000 / 1e9, 1e-4 + 1e-3, 1e-4 + 4e-3])
    assert (link.bytes_per_s, link.latency_s) == (pytest.approx(1e9), pytest.approx(1e-4))
    with pytest.raises(InputError, match="one size"):
        fit_link([8, 8], [1.0, 1.1])
    with pytest.raises(InputError, match="took no longer"):
        fit_link([8, 800], [1.0, 0.5])


@pytest.mark.parametrize("value", [float("nan"), 0.0, -1.0, float("inf")])
def test_impossible_time_of_a_message_is_named(value):
    """Before a solver sees it; a negative one would pass it."""
    with pytest.raises(InputError, match=f"a message of 800 bytes: a time of {value} s"):
        fit_link([8, 800, 8000], [1.0, value, 2.0])


@pytest.mark.parametrize(
    ("pick", "pair"),
    [
        (lambda row: row.degree == 2, "pack_s from ring_step_s"),
        (lambda row: row.load.tokens == 32 * row.load.samples, "pair_s from token_s"),
    ],
)
def test_terms_that_grow_together_are_named(pick, pair):
    """Any share between them would fit: a degree alone, or samples of one length."""
    packs = [*PACKS, *((32 * samples, samples) for samples in (1, 2, 3, 8))]
    rows = [row for row in tasks(packs=packs) if pick(row)]
    with pytest.raises(InputError, match=f"cannot tell {pair}"):
        fit_calibration(rows, SETUP)


def test_what_was_hardly_measured_is_noticed():
    """Two lengths and two degrees under noise: a plan by it says so."""
    packs = [(200, 1), (400, 1), (400, 2), (600, 3), (800, 2), (800, 4)]
    rows = [row for row in tasks(noise=0.05, packs=packs) if row.degree < 3]
    found = doubts(fit_calibration(rows, SETUP), SHAPE, 400, 4, checkpointing=False)
    assert any("hardly knows" in doubt and " ± " in doubt for doubt in found), found
    poor = replace(fit_calibration(tasks(), SETUP), error_mean=0.2)
    assert "by 20% on average" in doubts(poor, SHAPE, 400, 4, checkpointing=False)[0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5, 0.0])
def test_impossible_time_names_its_row(value):
    rows = tasks()
    rows[4] = replace(rows[4], seconds=value)
    with pytest.raises(InputError, match=f"measurements, row 5: a time of {value} s"):
        fit_calibration(rows, SETUP)


@pytest.mark.parametrize(
    ("pick", "cause"),
    [
        (lambda rows: rows[:1], "1 different task cannot give 5 coefficients"),
        (lambda rows: [], "0 different tasks cannot give 5 coefficients"),
        (lambda rows: rows[:1] * 30, "all 30 measurements have 32 tokens"),
        (lambda rows: [r for r in rows if r.load.tokens == 512], "all 8 measurements have 512 tokens"),
        (lambda rows: [r for r in rows if r.load.samples == 1], "every measurement holds one sample"),
        (lambda rows: [r for r in rows if r.degree == 1], "no measurement cuts a sample"),
        (lambda rows: [replace(r, load=Load()) for r in rows], "row 1: degree 1, 0 samples, 0 tokens"),
        (lambda rows: [replace(r, seconds=1.0) for r in rows], "token_s came out as 0"),
    ],
)
def test_measurements_that_tell_nothing(pick, cause):
    with pytest.raises(InputError, match=cause) as caught:
        fit_calibration(pick(tasks()), SETUP)
    assert caught.value.remedy


def test_file_comes_back(tmp_path):
    calibration = fit_calibration(tasks(noise=0.02), SETUP)
    path = tmp_path / "calibration.json"
    path.write_text(calibration.to_json())
    assert read_calibration(path) == calibration
    assert json.loads(path.read_text())["schema"] == CALIBRATION_SCHEMA
    assert hardware_at(str(path)) == calibration.hardware
    assert hardware_at("h100") == hardware("h100")


def test_stands_where_a_preset_stands():
    """At the measured shape the formula has the fitted coefficients; at another, they scale by counts."""
    calibration = fit_calibration(tasks(), SETUP)
    for term in TERMS:
        assert getattr(calibration.cost, term) == pytest.approx(calibration.coefficients[term])
    deeper = cost_model(replace(SHAPE, layers=8), calibration.hardware, checkpointing=False)
    assert deeper.pair_s == pytest.approx(2 * calibration.coefficients["pair_s"])
    assert deeper.ring_step_s == pytest.approx(2 * calibration.coefficients["ring_step_s"])


def test_measured_memory_decides_how_many_tokens_a_rank_holds():
    """A token that takes a quarter more than counted: a fifth fewer fit; unmeasured, the count stands."""
    measured, counted = (
        fit_calibration(tasks(), replace(SETUP, memory_bytes_per_token=value)).hardware
        for value in (1.25 * BYTES_PER_TOKEN, None)
    )
    assert (measured.token_scale, counted.token_scale) == (pytest.approx(1.25), 1.0)
    fewer, more = (tokens_per_rank(SHAPE, of, 2, checkpointing=False) for of in (measured, counted))
    assert fewer == pytest.approx(more / 1.25, rel=1e-3)


def test_notices_name_what_is_extrapolated():
    calibration = fit_calibration(tasks(), SETUP)
    assert doubts(calibration, replace(SHAPE, name="other"), 16_384, 16, checkpointing=False) == ()
    heavy = fit_calibration(tasks(), replace(SETUP, memory_bytes_per_token=10 * BYTES_PER_TOKEN))
    assert "10.0 times the bytes" in doubts(heavy, SHAPE, 4096, 4, checkpointing=False)[0]
    long, wide, other = doubts(calibration, model_shape("qwen3-8b"), 16_385, 17, checkpointing=False)
    assert "16,385 tokens, the calibration saw 4,096" in long
    assert "17 ranks, the calibration saw 4" in wide
    assert "another model (tiny, 4 layers x 128)" in other
    [inside] = doubts(calibration, SHAPE, 4096, 4, checkpointing=False, crosses_nodes=True)
    assert "inside one node: links between nodes are those of the preset cpu" in inside
    across = fit_calibration(tasks(), replace(SETUP, inter_link=Link(1e8, 1e-3)))
    assert doubts(across, SHAPE, 4096, 4, checkpointing=False, crosses_nodes=True) == ()


def test_links_between_nodes_are_measured_or_a_presets_and_never_the_faster():
    measured = fit_calibration(tasks(), replace(SETUP, inter_link=Link(1e8, 1e-3)))
    assert Calibration.from_json(measured.to_json()) == measured
    assert (measured.cost.inter, measured.cost.intra) == (Link(1e8, 1e-3), SETUP.link)
    cpu = hardware("cpu")
    assert fit_calibration(tasks(), SETUP).cost.inter == Link(cpu.inter_bytes_per_s, cpu.inter_latency_s)
    slow = Link(1e3, 1.0)
    assert (
        fit_calibration(tasks(replace(TRUTH, intra=slow, inter=slow)), replace(SETUP, link=slow)).cost.inter
        == slow
    )


def test_other_device_is_refused_by_name():
    calibration = fit_calibration(tasks(), SETUP)
    calibration.require_device("cpu: a test")
    with pytest.raises(InputError, match="measured on cpu: a test, this rank runs on NVIDIA X"):
        calibration.require_device("NVIDIA X")


@pytest.mark.parametrize(
    ("place", "value", "cause"),
    [
        ("schema", "flexcp.calibration/9", "has schema 'flexcp.calibration/9', this FlexCP reads"),
        ("coefficients.token_s", None, "coefficients.token_s is missing"),
        ("coefficients.pair_s", -1.0, "coefficients.pair_s is -1.0"),
        ("coefficients.pair_s", 0.0, "coefficients.pair_s is 0.0"),
        ("coefficients.pack_s", float("nan"), "coefficients.pack_s is nan"),
        ("coefficients.pack_s", "1", "coefficients.pack_s is '1'"),
        ("coefficients.pack_s", True, "coefficients.pack_s is True"),
        ("setup.link.bytes_per_s", 0, "setup.link.bytes_per_s is 0"),
        ("setup.inter_link", {"bytes_per_s": 1e9}, "setup.inter_link.latency_s is missing"),
        ("setup.clock", "sun", "setup.clock is 'sun'"),
        ("setup.model.layers", 0, "setup.model.layers is 0"),
        ("setup.model.tied", 1, "setup.model.tied is 1"),
        ("setup.model", None, "setup.model.name is missing"),
        ("setup.versions", [], "setup.versions is \\[\\]"),
        ("setup.device", "", "setup.device is ''"),
        ("degrees", [], "degrees is \\[\\]"),
        ("degrees", 2, "degrees is 2"),
        ("tokens", [1, 2, 3], "tokens is \\[1, 2, 3\\]"),
        ("memory_bytes", 1.5, None),
        ("setup.memory_bytes", 1.5, "setup.memory_bytes is 1.5"),
        ("setup.memory_bytes_per_token", -1, "setup.memory_bytes_per_token is -1"),
        ("setup.memory_bytes_per_token", 5e-324, "setup.memory_bytes_per_token is 5e-324"),
        ("setup", [], "setup is \\[\\]"),
        ("setup.model", [], "setup.model is \\[\\]"),
        ("setup.link", [], "setup.link is \\[\\]"),
        ("setup.inter_link", [], "setup.inter_link is \\[\\]"),
        ("setup.model.encoder", [], "setup.model.encoder is \\[\\]"),
        ("coefficients", [], "coefficients is \\[\\]"),
        ("spreads", "x", "spreads is 'x'"),
        ("coefficients.pair_s", 1e308, "coefficients.pair_s is 1e\\+308"),
        ("coefficients.token_s", 5e-324, "coefficients.token_s is 5e-324"),
        ("coefficients.pack_s", 1e7, "coefficients.pack_s is 10000000.0"),
        ("coefficients.pack_s", 10**400, "coefficients.pack_s is 1000"),
        ("error_mean", 10**400, "error_mean is 1000"),
        ("setup.link.latency_s", 10**400, "setup.link.latency_s is 1000"),
        ("setup.link.bytes_per_s", 0.5, "setup.link.bytes_per_s is 0.5"),
        ("setup.memory_bytes", 10**400, "setup.memory_bytes is 1000"),
        ("setup.model.layers", 10**400, "setup.model.layers is 1000"),
        ("degrees", [10**400], "degrees.0 is 1000"),
        ("tokens", [5, 4], "tokens is \\[5, 4\\]"),
    ],
)
def test_damaged_file_names_its_field(place, value, cause):
    raw = json.loads(fit_calibration(tasks(), SETUP).to_json())
    *path, last = place.split(".")
    table = raw
    for part in path:
        table = table[part]
    if value is None:
        del table[last]
    else:
        table[last] = value
    text = json.dumps(raw)
    if cause is None:  # a key nobody knows is from a later version of the same schema
        assert Calibration.from_json(text).setup == SETUP
    else:
        with pytest.raises(InputError, match=f"^cal.json:? {cause}"):
            Calibration.from_json(text, "cal.json")


def test_truncated_or_absent_file(tmp_path):
    path = tmp_path / "calibration.json"
    with pytest.raises(InputError, match=r"calibration\.json cannot be read"):
        read_calibration(path)
    path.write_text(fit_calibration(tasks(), SETUP).to_json()[:300])
    with pytest.raises(InputError, match=r"calibration\.json is not JSON"):
        read_calibration(path)
    path.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"calibration\.json is not JSON"):
        read_calibration(path)
    path.write_text("[1]")
    with pytest.raises(InputError, match="has schema None"):
        read_calibration(path)


def write(folder: Path, *lines: str) -> Path:
    path = folder / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_table_of_measurements(tmp_path):
    rows = tasks()
    lines = [",".join(map(str, (*r.load.counts, r.degree, r.seconds))) for r in rows]
    assert read_measurements(write(tmp_path, ",".join(COLUMNS), *lines)) == tuple(rows)


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([], "has no column 'tokens'"),
        ([",".join(COLUMNS[:-1]), "8,36,1,8,1,0,2"], "has no column 'seconds'"),
        ([",".join(COLUMNS)], "holds no measurement"),
        ([",".join(COLUMNS), "8,36,1,8,1,0,2,0.1", "8,36,1,8"], "row 2: cut_samples is missing"),
        ([",".join(COLUMNS), "8,36,1,8,1,0,2,nan"], "row 1: a time of nan s"),
        ([",".join(COLUMNS), "8,36,1,8,1,0,2,-1"], "row 1: a time of -1.0 s"),
        ([",".join(COLUMNS), "8,36,1,8,1,0,2,fast"], "row 1: seconds is 'fast'"),
        ([",".join(COLUMNS), "8.5,36,1,8,1,0,2,1"], "row 1: tokens is '8.5'"),
        ([",".join(COLUMNS), "8,36,1,8,1,0,0,1"], "row 1: degree 0"),
        ([",".join(COLUMNS), "8,65,1,8,1,0,2,1"], "row 1: 65 pairs are more than 8 tokens have"),
        ([",".join(COLUMNS), "8,36,9,8,1,0,2,1"], "row 1: samples is 9, and tokens 8"),
        ([",".join(COLUMNS), "8,36,1,8,2,0,2,1"], "row 1: cut_samples is 2, and samples 1"),
        ([",".join(COLUMNS), "8,36,1,9,1,0,2,1"], "row 1: cut_tokens is 9, and tokens 8"),
        ([",".join(COLUMNS), "8,36,1,8,1,9,2,1"], "row 1: longest_whole_tokens is 9, and tokens 8"),
        ([",".join(COLUMNS), "8,36,1,8,1,0,2,1e-320"], "row 1: a time of 1e-320 s"),
        ([",".join(COLUMNS), "8,36,1,8,1,0,2,1", "9" * 400 + ",36,1,8,1,0,2,1"], "row 2: tokens is '999"),
        ([",".join(COLUMNS), "8," + "9" * 5000 + ",1,8,1,0,2,1"], "row 1: pairs is '999"),
        ([",".join(COLUMNS), "8," + "9" * 200_000 + ",1,8,1,0,2,1"], "row 1 cannot be read: field larger"),
        (["when,ms", "1,2"], "has no column 'tokens', 'pairs', 'samples'"),
    ],
)
def test_bad_table_names_its_row(tmp_path, lines, cause):
    with pytest.raises(InputError, match=cause):
        read_measurements(write(tmp_path, *lines))


def test_table_from_a_spreadsheet(tmp_path):
    """A byte order mark, and spaces after commas."""
    path = write(tmp_path, ", ".join(COLUMNS), "8, 36, 1, 8, 1, 0, 2, 0.5")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_measurements(path) == (Measurement(Load(8, 36, 1, 8, 1, 0), 2, 0.5),)


def test_an_encoder_may_take_more_pairs_than_tokens_have(tmp_path):
    path = write(tmp_path, ",".join(COLUMNS), "8,650,1,8,1,0,2,1")
    assert read_measurements(path, encoder=True)[0].load.pairs == 650


def test_a_fit_that_could_not_be_read_is_refused():
    """Reading it would refuse the file; better before it is written."""
    slow = replace(TRUTH, pair_s=1.0, token_s=1e4, sample_s=1e4, pack_s=5e6, ring_step_s=1e5)
    with pytest.raises(InputError, match=r"^pack_s came out as 5e\+06 s"):
        fit_calibration(tasks(slow), SETUP)


def test_thinned_distca_times_are_predicted():
    """Packs of real H100 times that the fit has not seen, in the copy that is shipped."""
    rows = read_attention_times(Path(__file__).parents[1] / "data" / "distca_attn_every_8th_pack.psv")
    found = fit_attention(rows, seed=0)
    assert (found.fitted_packs, found.unseen_packs, found.unseen_rows) == (10, 11, 176)
    assert found.error_mean < 0.03
    assert found.seconds([65_510, 26], 1, 1) == pytest.approx(0.19696, rel=0.03)
    alone = max({row.lengths for row in rows}, key=lambda pack: abs(found.seconds(pack, 1, 1)))
    strange = [replace(row, cp=64) if row.lengths == alone else row for row in rows]
    with pytest.raises(InputError, match="cp 64 occurs only in packs that are held out"):
        [fit_attention(strange, seed=seed) for seed in range(8)]
    with pytest.raises(InputError, match="cp 3 was not measured"):
        found.seconds([8], 1, 3)


@pytest.mark.skipif(not DISTCA.exists(), reason=f"{DISTCA} is not here; its thinned copy is tested above")
@pytest.mark.parametrize("seed", range(3))
def test_all_distca_times_are_predicted(seed):
    found = fit_attention(read_attention_times(DISTCA), seed=seed)
    assert (found.unseen_packs, found.unseen_rows) == (83, 1328)
    assert found.error_mean < 0.03


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("1|0|5|[4, 1]", "row 1: cp is 0"),
        ("1|1|-5|[4, 1]", "row 1: a time of -0.005 s"),
        ("1|1|5|[4, x]", "row 1: batch is"),
        ("1|1|5|[]", "row 1: batch is"),
        ("1|1|5|[4, 0]", "row 1: batch is"),
        ("1|1|5", "row 1: batch is missing"),
        ("1|1|5|" + "[" * 100_000, "row 1: batch is"),
        ("1|1|5|[" + "9" * 400 + "]", "row 1: batch is"),
        ("1" * 400 + "|1|5|[4]", "row 1: tp is '111"),
    ],
)
def test_bad_distca_row_is_named(tmp_path, row, cause):
    with pytest.raises(InputError, match=cause):
        read_attention_times(write(tmp_path, "tp|cp|real_attn_time_ms|batch", row))


def test_attention_of_single_documents_is_predicted():
    """Reading all keys and values (tokens / tp) is what pairs alone do not say: without it 12 to 20 %."""
    rows = read_attention_times(ONE_DOCUMENT)
    errors = [fit_attention(rows, seed=seed).error_mean for seed in range(8)]
    assert sum(errors) / len(errors) < 0.075
    found = fit_attention(rows)
    assert (found.fitted_packs, found.unseen_packs, found.unseen_rows) == (5, 6, 96)
    assert found.token_s > 0
    assert found.seconds([8192], 1, 1) == pytest.approx(3.7067e-3, rel=0.1)


def test_attention_tables_are_told_from_task_times(tmp_path):
    assert is_attention_table(ONE_DOCUMENT)
    assert is_attention_table(ONE_DOCUMENT.with_name("distca_attn_every_8th_pack.psv"))
    assert not is_attention_table(write(tmp_path, ",".join(COLUMNS)))


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("64,1,0,0.03", "row 1: tp is 0"),
        ("64,1,1,nan", "row 1: a time of nan s"),
        ("0,1,1,0.03", "row 1: L is 0"),
        ("64,1", "row 1: tp is missing"),
    ],
)
def test_bad_row_of_single_documents_is_named(tmp_path, row, cause):
    with pytest.raises(InputError, match=cause):
        read_attention_times(write(tmp_path, "L,cp,tp,duration_per_doc", row))


def test_attention_fit_needs_different_packs():
    with pytest.raises(InputError, match="1 different packs are too few"):
        fit_attention([AttentionTime((8, 8), 1, 1, 0.1)] * 20)
    with pytest.raises(InputError, match="has no column"):
        read_attention_times(Path(__file__).parents[1] / "data" / "README.md")
