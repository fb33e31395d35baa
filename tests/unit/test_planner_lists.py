"""Plans of real lists of lengths stay close to the bound; lists that are not there are skipped by name."""

import random
from pathlib import Path

import pytest

from flexcp.core.cluster import Cluster
from flexcp.core.lengths import read_lengths
from flexcp.core.model_shape import model_shape
from flexcp.core.sample import samples_from_lengths
from flexcp.cost import cost_model, hardware
from flexcp.planner import check, make_plan

ROOT = Path(__file__).parents[2]
COST = cost_model(model_shape("qwen3-8b"), hardware("h100"))
# Public lists, looked for in `shared/data` inside the repository or beside it.
FOLDERS = (ROOT / "tests/data", ROOT / "shared/data", ROOT.parent / "shared/data")
LISTS = {
    "python_source_lengths_qwen.json": None,
    "distca_dist_prolong.json": None,
    "azure_llm_2023_conv.csv": "ContextTokens",
    "meg-gpt2-openwebtext_text_document.idx": None,
    "mooncake_conversation_lengths.csv": "input_length",
}


def lengths_of(name):
    path = next((folder / name for folder in FOLDERS if (folder / name).exists()), None)
    if path is None:
        pytest.skip(f"{name} is in none of {', '.join(str(folder) for folder in FOLDERS)}")
    return read_lengths(path, LISTS[name])


def plan_of(name, ranks, tokens, mode):
    lengths = [int(length) for length in lengths_of(name) if length <= ranks * tokens]
    draw = random.Random(0)
    size = 512 if ranks < 128 else 8 * ranks
    drawn = draw.sample(lengths, size) if size <= len(lengths) else draw.choices(lengths, k=size)
    plan = make_plan(samples_from_lengths(drawn), Cluster(ranks, tokens), COST, mode=mode)
    assert check(plan, COST) == ()
    return plan


@pytest.mark.parametrize(("mode", "gap"), [("free-running", 1.01), ("lockstep", 1.06)])
def test_python_sources_on_64_ranks(mode, gap):
    assert plan_of("python_source_lengths_qwen.json", 64, 8192, mode).gap <= gap


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [4096, 8192, 16384])
@pytest.mark.parametrize("ranks", [8, 24, 32, 48, 64, 100, 128])
@pytest.mark.parametrize("name", LISTS)
def test_all_lists(name, ranks, tokens):
    # Half of the mooncake samples need two ranks or more at 4096 tokens: little is left to fill gaps with.
    worst = 1.085 if name.startswith("mooncake") and tokens == 4096 else 1.02
    assert plan_of(name, ranks, tokens, "free-running").gap <= worst
    assert plan_of(name, ranks, tokens, "lockstep").gap <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [4096, 8192, 16384])
@pytest.mark.parametrize("name", LISTS)
def test_all_lists_on_1024_ranks(name, tokens):
    worst = 1.085 if name.startswith("mooncake") and tokens == 4096 else 1.03
    assert plan_of(name, 1024, tokens, "free-running").gap <= worst
