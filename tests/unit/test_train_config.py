"""A run file: read strictly, and every mistake named by its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexcp.core.errors import ConfigError, UnknownNameError
from flexcp.train.config import TrainConfig, load_config, to_json


@pytest.fixture
def run_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "run.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_an_empty_file_is_the_default_run(run_file: Any) -> None:
    assert load_config(run_file("")) == TrainConfig()


def test_a_run_reads_back_from_what_is_written_beside_it(run_file: Any) -> None:
    config = load_config(
        run_file(
            '[data]\npath = "docs"\nexclude = ["a", "b"]\n[optimizer]\nbetas = [0.8, 0.9]\nclip_norm = 2\n'
        )
    )

    assert config.data.exclude == ("a", "b")
    assert config.optimizer.betas == (0.8, 0.9)
    assert TrainConfig.model_validate(json.loads(to_json(config))) == config


@pytest.mark.parametrize(
    ("text", "cause", "hint"),
    [
        ("[run]\nstpes = 3\n", "unknown key 'run.stpes'", "Did you mean 'run.steps'? Known: run."),
        ("[paralel]\nnproc = 3\n", "unknown key 'paralel'", "Did you mean 'parallel'? Known: data, model,"),
        ("steps = 3\n", "unknown key 'steps'", "Known: data, model, optimizer, parallel, run."),
        (
            '[parallel]\npolicy = "flexcpp"\n',
            "unknown policy 'flexcpp'",
            "Did you mean 'flexcp'? Known: flexcp,",
        ),
        ('[parallel]\nhardware = "h10"\n', "unknown hardware 'h10'", "Did you mean 'h100'?"),
    ],
)
def test_an_unknown_name_comes_with_the_nearest(run_file: Any, text: str, cause: str, hint: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        load_config(run_file(text))

    assert caught.value.cause == cause
    assert hint in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('[run]\nsteps = "many"\n', "run.steps = 'many': Input should be a valid integer"),
        ("[run]\nsteps = 0\n", "run.steps = 0: Input should be greater than or equal to 1"),
        ('[run]\ndtype = "fp16"\n', "run.dtype = 'fp16': Input should be 'fp32', 'bf16' or 'fp64'"),
        ("[optimizer]\nlr = -1.0\n", "optimizer.lr = -1.0: Input should be greater than 0"),
        ("[optimizer]\nbetas = [0.9]\n", "optimizer.betas.1 = "),
        ("run = 3\n", "run = 3: Input should be an object"),
        (
            "[run]\nglobal_batch = 10000000000\n",
            "run.global_batch = 10000000000: Input should be less than or",
        ),
        ("[run]\ntimeout_s = 1e-9\n", "run.timeout_s = 1e-09: Input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_value_is_named_by_its_key(run_file: Any, text: str, cause: str) -> None:
    path = run_file(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)

    assert caught.value.cause.startswith(cause)
    assert caught.value.remedy == f"Mend it in {path} or with --set."


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("[run]\neval_every = 5\n", "run.eval_every is 5, and data.eval_samples 0"),
        ('[run]\ntrackers = ["wandb", "wandb"]\n', "run.trackers names one twice: wandb, wandb"),
    ],
)
def test_values_that_say_nothing_together_are_refused(run_file: Any, text: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_file(text))

    assert caught.value.cause.startswith(cause)
    assert caught.value.remedy


def test_set_takes_what_toml_takes_and_bare_words(run_file: Any) -> None:
    path = run_file('[run]\nsteps = 5\nglobal_batch = 8\n[parallel]\npolicy = "static"\n')
    overrides = [
        "run.steps=7",
        "optimizer.lr=1e-4",
        "model.tied=false",
        "parallel.policy=paper",
        'data.path="@a = b"',
        "data.text_column = body ",
        "data.tokenizer=bpe:512",
        'data.exclude=["x", "y"]',
        "run.folder=runs/a=b",
    ]
    config = load_config(path, overrides)

    assert (config.run.steps, config.run.global_batch) == (7, 8)
    assert config.optimizer.lr == 1e-4
    assert config.model.tied is False
    assert config.parallel.policy == "paper"
    assert (config.data.path, config.data.text_column) == ("@a = b", "body")
    assert (config.data.tokenizer, config.data.exclude) == ("bpe:512", ("x", "y"))
    assert config.run.folder == Path("runs/a=b")


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("steps=3", "Did you mean run.steps?"),
        ("tracker=3", "Did you mean run.trackers?"),
        ("run.steps", "For example --set run.steps=10"),
        ("=3", "For example --set run.steps=10"),
        ("", "For example --set run.steps=10"),
    ],
)
def test_set_wants_section_key_and_value(run_file: Any, override: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_file(""), [override])

    assert str(caught.value) == f"--set {override!r} is not section.key=value\n{remedy}"


def test_a_word_where_a_list_is_wanted_is_told_how_to_write_it(run_file: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(run_file(""), ["run.trackers=wandb"])

    assert caught.value.cause.startswith("run.trackers = 'wandb': ")
    assert caught.value.remedy.startswith('A list is wanted, also of one: run.trackers = ["wandb"].')


def test_set_is_checked_like_the_file(run_file: Any) -> None:
    path = run_file("")
    with pytest.raises(UnknownNameError, match=r"unknown key 'run.step'\nDid you mean 'run.steps'"):
        load_config(path, ["run.step=3"])
    with pytest.raises(ConfigError, match=r"run.steps = 'x'"):
        load_config(path, ["run.steps=x"])
    with pytest.raises(ConfigError, match=r"run = 3: "):
        load_config(run_file("run = 3"), ["run.steps=4"])


def test_files_that_are_no_run_files(tmp_path: Path, run_file: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "none.toml")
    assert str(caught.value) == f"{tmp_path}/none.toml does not exist\nGive the path of a run file (TOML)."

    path = run_file("[run\nsteps = 3")
    with pytest.raises(ConfigError, match=rf"{path} is not a TOML file: .*\nSee examples/demo.toml."):
        load_config(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a TOML file"):
        load_config(path)
    with pytest.raises(ConfigError, match="is not a TOML file"):
        load_config(tmp_path)
    for text in (f"x = 1{'0' * 5000}", f"x = {'[' * 5000}"):
        with pytest.raises(ConfigError, match="is not a TOML file"):
            load_config(run_file(text))
        with pytest.raises(ConfigError, match=r"^run.steps = "):
            load_config(run_file(""), [f"run.steps={text[4:]}"])
    with pytest.raises(ConfigError, match="is not a TOML file: embedded null byte"):
        load_config(Path("a\0b"))


def test_paths_that_lead_nowhere(tmp_path: Path, run_file: Any) -> None:
    """The nearest name beside it, of run file, data and model; no network is mentioned."""
    (tmp_path / "texts").mkdir()
    path = run_file("")
    with pytest.raises(ConfigError, match=rf"does not exist\nDid you mean {path}\?"):
        load_config(path.with_suffix(".tml"))
    with pytest.raises(
        ConfigError, match=rf"data.path .*text does not exist\nDid you mean {tmp_path}/texts\?"
    ):
        load_config(path, [f"data.path={tmp_path}/text"])
    with pytest.raises(ConfigError, match=r"model\.config qwen3-8b does not exist\nGive a config\.json"):
        load_config(path, ["model.config=qwen3-8b"])


def test_a_model_is_described_once(run_file: Any) -> None:
    """All that is said beside a config is named at once."""
    with pytest.raises(ConfigError, match=r"model\.config is given, and model\.heads, model\.layers too"):
        load_config(run_file('[model]\nconfig = "x"\nlayers = 2\nheads = 2'))


@pytest.mark.parametrize(
    "key",
    ["model.pretrained", "model.config", "data.path", "data.tokenizer", "data.index_dir", "run.folder"],
)
@pytest.mark.parametrize(
    ("path", "why"),
    [("a\\u0000b", "embedded null byte"), ("x" * 5000, "File name too long"), ("loop", "Too many levels of")],
)
def test_a_path_that_no_disk_can_hold_is_refused(
    run_file: Any, monkeypatch: pytest.MonkeyPatch, key: str, path: str, why: str
) -> None:
    """Before any rank is started, and cut to a length that can be read."""
    section, _, name = key.partition(".")
    file = run_file(f'[{section}]\n{name} = "{path}"\n')
    monkeypatch.chdir(file.parent)
    Path("loop").symlink_to("loop")
    with pytest.raises(ConfigError) as caught:
        load_config(file)

    assert caught.value.cause.startswith(f"{key} '")
    assert f"' cannot be used: {why}" in caught.value.cause
    assert len(caught.value.cause) < 300


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("hidden", 10**25, "less than or equal to"),
        ("layers", 2**63 - 1, "less than or equal to"),
        ("heads", 2**40, "less than or equal to"),
        ("head_dim", 7, "multiple of 2"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(run_file: Any, key: str, value: int, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model.{key} = {value}: .*{why}"):
        load_config(run_file(f"[model]\n{key} = {value}\n"))


def test_an_override_is_text(run_file: Any) -> None:
    """Bytes of the command line that are none."""
    with pytest.raises(ConfigError, match=r"--set .* is not UTF-8"):
        load_config(run_file(""), ["run.folder=\udcff"])


@pytest.mark.parametrize(
    ("change", "why"),
    [({"hidden_size": -32}, "negative"), ({"hidden_act": "nonesuch"}, "KeyError: 'nonesuch'")],
)
def test_a_config_that_describes_no_model_is_named(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    """transformers looks at it where it builds, with errors of every kind."""
    import torch

    from flexcp.train.config import ModelSection, RunSection
    from flexcp.train.model import build_model, model_config

    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    body = {"model_type": "llama", "vocab_size": 300, **shape, **change}
    (tmp_path / "config.json").write_text(json.dumps(body))
    config = model_config(ModelSection(config=tmp_path), 257, 100)
    with pytest.raises(ConfigError, match=f"no model can be built as the config says: .*{why}"):
        build_model(config, RunSection(), torch.device("cpu"))
