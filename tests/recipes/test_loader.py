"""Recipes: typos, numbers, variables, paths, overrides; every message names the key, the value and what is allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintain.recipes.config import RecipeConfig
from quintain.recipes.loader import RECIPES_DIR, RecipeError, dump_config, load_recipe
from quintain.recipes.recipe_yaml import dump_yaml, parse_yaml

MINIMAL = "name: tiny\nenvironment:\n  id: quintain/Calculator-v0\n"


@pytest.fixture
def recipe(tmp_path: Path):
    """Writes a recipe: the minimal one and what the test adds."""

    def write(text: str = "", *, base: str = MINIMAL) -> Path:
        path = tmp_path / "tiny.yaml"
        path.write_text(base + text, encoding="utf-8")
        return path

    return write


def problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems


@pytest.mark.parametrize("shipped", sorted(RECIPES_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_loads(shipped: Path):
    assert load_recipe(shipped).config.name


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("algorithm.lerning_rate", "algorithm.learning_rate"),  # a typo: among the siblings
        ("trainer.learning_rat", "algorithm.learning_rate"),  # right name, wrong section
        ("trainer.micro-batch-tokens", "trainer.micro_batch_tokens"),  # dashes
        ("warm_strat.learning_rate", "warm_start.learning_rate"),  # a section
        ("model.scratch.num_layer", "model.scratch.num_layers"),  # nested
        ("learning_rate", "algorithm.learning_rate"),  # no section
        ("group-size", "algorithm.group_size"),
        ("engine.typ", "engine.type"),
        ("engine.lanch.python", "engine.launch.python"),
        ("engine.launch.num_server", "engine.launch.num_servers"),
        ("engine.max_inflight", "engine.max_in_flight"),
    ],
)
def test_an_unknown_override_is_refused_with_its_path_and_the_nearest_valid_one(recipe, key: str, nearest: str):
    """H01"""
    (problem,) = problems(recipe(), f"{key}=1")
    assert problem == f"{key}: unknown key; did you mean {nearest}?"


def test_unknown_keys_of_a_file_are_all_reported_at_every_level(recipe):
    """H01"""
    text = "sede: 1\ntrainer:\n  num-threads: 2\n  learning_rat: 1e-6\nmodel:\n  scratch: {hiden_size: 64}\n"
    assert problems(recipe(text)) == (
        "sede: unknown key; did you mean seed?",
        "trainer.num-threads: unknown key; did you mean trainer.num_threads?",
        "trainer.learning_rat: unknown key; did you mean algorithm.learning_rate?",
        "model.scratch.hiden_size: unknown key; did you mean model.scratch.hidden_size?",
    )


def test_a_key_like_no_other_is_answered_with_the_valid_ones(recipe):
    """H01"""
    (problem,) = problems(recipe(), "trainer.xyzzy=1")
    assert problem == "trainer.xyzzy: unknown key; the keys of trainer are " + ", ".join(
        type(RecipeConfig.model_fields["trainer"].default).model_fields
    )


def test_unknown_keys_inside_an_override_s_mapping_are_found_too(recipe):
    """H01"""
    (problem,) = problems(recipe(), "algorithm={clip_lo: 0.1}")
    assert problem == "algorithm.clip_lo: unknown key; did you mean algorithm.clip_low?"


def test_a_dotted_key_in_a_file_is_told_to_be_nested(recipe):
    (problem,) = problems(recipe("algorithm.learning_rate: 1e-4\n"))
    assert "dotted keys are for the command line" in problem


def test_keys_below_a_value_are_refused_and_below_keyword_arguments_are_free(recipe):
    (problem,) = problems(recipe(), "seed.x=1")
    assert problem == "seed.x: seed is a value, it has no keys below it"
    config = load_recipe(recipe(), ["environment.kwargs.size.x=2"]).config
    assert config.environment.kwargs == {"size": {"x": 2}}


@pytest.mark.parametrize("override", ["seed", "=1", "", "--seed"])
def test_an_override_without_a_value_says_how_one_looks(recipe, override: str):
    (problem,) = problems(recipe(), override)
    assert "key.path=value" in problem


@pytest.mark.parametrize("written", ["1e-6", "1E-6", "1.0e-6", ".000001", "0.000001", "1e-06", "+1e-6"])
def test_every_way_to_write_a_float_is_a_float(recipe, written: str):
    """H02"""
    in_file = load_recipe(recipe(f"algorithm:\n  learning_rate: {written}\n")).config
    as_override = load_recipe(recipe(), [f"algorithm.learning_rate={written}"]).config
    assert in_file.algorithm.learning_rate == as_override.algorithm.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("written", "value"), [("1e6", 1_000_000), ("12e03", 12_000), ("3.0", 3), ("1E2", 100), ("010", 10)]
)
def test_whole_numbers_may_be_written_as_floats(recipe, written: str, value: int):
    """H02"""
    config = load_recipe(recipe(), [f"trainer.steps={written}"]).config
    assert config.trainer.steps == value and type(config.trainer.steps) is int


@pytest.mark.parametrize("written", ["1e-6", "1.5", "true", "ten", "null", "[3]", ".inf"])
def test_what_is_no_whole_number_is_refused_where_one_is_due(recipe, written: str):
    """H02"""
    (problem,) = problems(recipe(), f"trainer.steps={written}")
    assert problem.startswith("trainer.steps = ") and problem.endswith("must be a whole number >= 1")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("algorithm.clip_low=1.5", "algorithm.clip_low = 1.5: must be a number > 0 and < 1"),
        ("algorithm.loss=ppp", "algorithm.loss = 'ppp': must be one of ppo, gspo, cispo, reinforce"),
        ("model.path=3", "model.path = 3: must be text, or null; quote it to make it text"),
        ("tracking.aim=maybe", "tracking.aim = 'maybe': must be true or false"),
        ("sandbox.cpus=true", "sandbox.cpus = true: must be a number > 0"),
        ("algorithm.learning_rate=.inf", "algorithm.learning_rate = inf: must be a finite number > 0"),
        ("algorithm.truncated_reward=.nan", "algorithm.truncated_reward = nan: must be a finite number"),
        ("sandbox.cpus=.inf", "sandbox.cpus = inf: must be a finite number > 0"),
        ("sandbox.exec_timeout_s=1e6", "sandbox.exec_timeout_s = 1000000.0: must be a number > 0 and <= 86400"),
        (
            "trainer.num_threads=100000",
            "trainer.num_threads = 100000: must be a whole number >= 1 and <= 1024, or null",
        ),
        ("environment.num_train_tasks=0", "environment.num_train_tasks = 0: must be a whole number >= 1, or null"),
    ],
)
def test_a_wrong_value_is_answered_with_key_value_and_what_is_allowed(recipe, override: str, problem: str):
    assert problems(recipe(), override) == (problem,)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["engine.type=sglan"], "engine.type = 'sglan': must be one of local, sglang"),
        (["engine.type=sglang"], "engine.type = sglang needs engine.urls (running servers) or engine.launch"),
        (["engine.urls=[http://a:1]"], "engine.urls is for engine.type = sglang, and engine.type is local"),
        (["engine.type=sglang", "engine.urls=[a:1]"], "engine.urls: 'a:1' is no address of a server"),
        (["engine.type=sglang", "engine.launch.num_servers=2"], "engine.launch.python: required, and not given"),
        (["engine.type=sglang", "engine.urls=http://a:1"], "engine.urls = 'http://a:1': must be a list"),
        (["engine.type=sglang", "engine.urls=[http://a:1]", "engine.launch.python=x"], "engine.type = sglang needs"),
    ],
)
def test_an_engine_without_servers_or_with_two_kinds_is_refused(recipe, overrides: list[str], problem: str):
    (found,) = problems(recipe(), *overrides)
    assert found.startswith(problem)


def test_the_engine_s_interpreter_is_relative_to_the_recipe_and_its_arguments_may_be_numbers(recipe, tmp_path: Path):
    text = "engine:\n  type: sglang\n  launch: {python: env/bin/python, extra_args: [--tp-size, 2], env: {GPU: 1}}\n"
    config = load_recipe(recipe(text)).config
    assert config.engine.launch is not None
    assert config.engine.launch.python == str(tmp_path / "env/bin/python")
    assert config.engine.launch.extra_args == ("--tp-size", "2") and config.engine.launch.env == {"GPU": "1"}
    assert load_recipe(recipe(dump_config(config), base="")).config == config
    on_path = load_recipe(recipe(), ["engine.type=sglang", "engine.launch.python=python3"]).config.engine.launch
    assert on_path is not None and on_path.python == "python3"


@pytest.mark.parametrize("name", ["../../x", "a/b", "[x]", ".hidden", "''", "a b", "x" * 101, '"a\\n"'])
def test_a_name_that_cannot_name_a_folder_is_refused(recipe, name: str):
    (problem,) = problems(recipe(), f"name={name}" if name != "[x]" else "name='[x]'")
    assert problem.startswith("name = ") and "letters, digits" in problem


def test_what_is_missing_is_named(tmp_path: Path):
    (tmp_path / "empty.yaml").write_text("")
    found = problems(tmp_path / "empty.yaml")
    assert found[0] == "name: required, and not given; must be text"
    assert found[1].startswith("environment: required, and not given; must be a section with some of the keys id, ")


@pytest.mark.parametrize(
    ("tasks", "group_size", "minibatches", "valid"),
    [
        (32, 8, 4, True),  # 32 draws x 8 members, mini-batches of 64 trajectories
        (32, 8, 1, True),
        (32, 3, 32, True),
        (1, 1, 1, True),
        (32, 8, 5, False),
        (8, 64, 16, False),  # fewer draws than mini-batches, whatever the number of trajectories
        (7, 8, 2, False),
    ],
)
def test_a_batch_is_divided_by_task_draws_whatever_the_group_size(
    recipe, tasks: int, group_size: int, minibatches: int, valid: bool
):
    """H03"""
    sizes = {"tasks_per_step": tasks, "group_size": group_size, "minibatches_per_step": minibatches}
    overrides = [f"algorithm.{key}={value}" for key, value in sizes.items()]
    if valid:
        assert load_recipe(recipe(), overrides).config.algorithm.tasks_per_step == tasks
    else:
        (problem,) = problems(recipe(), *overrides)
        assert f"algorithm.tasks_per_step ({tasks} task draws)" in problem
        assert f"algorithm.minibatches_per_step ({minibatches})" in problem


@pytest.mark.parametrize("name", ["model", "./model", "sub/../model", "../{here}/model"])
def test_a_relative_path_starts_at_the_recipe_from_every_folder(recipe, tmp_path: Path, name: str):
    """H06"""
    (tmp_path / "model").mkdir()
    (tmp_path / "sub").mkdir()
    path = recipe(f"model:\n  path: {name.format(here=tmp_path.name)}\n")
    before = Path.cwd()
    seen = []
    try:
        for folder in (tmp_path, Path("/")):
            os.chdir(folder)
            loaded = load_recipe(path if folder == Path("/") else path.name)
            seen.append(loaded.config.model.path)
            assert loaded.resolved["model"]["path"] == loaded.config.model.path
            assert str(tmp_path / "model") in dump_config(loaded.config)
    finally:
        os.chdir(before)
    assert seen == [str(tmp_path / "model")] * 2


def test_an_override_s_path_starts_at_the_recipe_too(recipe, tmp_path: Path):
    """H06"""
    config = load_recipe(recipe(), ["environment.id=envs/mine.py:Mine", "warm_start.cache_dir=cache"]).config
    assert config.environment.id == f"{tmp_path}/envs/mine.py:Mine"
    assert config.warm_start.cache_dir == str(tmp_path / "cache")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_a_hub_name_stays_as_it_is(recipe, name: str):
    """H06"""
    assert load_recipe(recipe(), [f"model.path={name}"]).config.model.path == name


def test_a_saved_config_is_read_back_equal_from_another_folder(recipe, tmp_path: Path):
    """H06"""
    (tmp_path / "model").mkdir()
    first = load_recipe(recipe("model: {path: model}\n"), ["environment.id=mine.py:Mine", "environment.kwargs.a='1e6'"])
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(first.config), encoding="utf-8")
    assert load_recipe(run / "config.yaml").config == load_recipe(run).config == first.config


@pytest.mark.parametrize(
    ("key", "in_file", "written", "value"),
    [
        ("tracking.aim", "true", "false", False),
        ("warm_start.enabled", "true", "false", False),
        ("checkpoint.every_steps", "10", "0", 0),
        ("algorithm.kl_coef", "0.5", "0", 0.0),
        ("seed", "5", "0", 0),
        ("environment.max_turns", "3", "null", None),
        ("tracking.experiment", "mine", '""', ""),
        ("tracking.experiment", "mine", "null", None),
        ("environment.kwargs", "{a: 1}", "{}", {}),
        ("environment.kwargs.a", "{b: 1}", "false", False),
    ],
)
def test_an_explicit_false_zero_empty_or_null_wins(recipe, key: str, in_file: str, written: str, value: object):
    """H07"""
    base = "name: tiny\nenvironment: {id: quintain/Calculator-v0}\n"
    loaded = load_recipe(recipe(base=base), [f"{key}={in_file}", f"{key}={written}"]).resolved
    for part in key.split("."):
        loaded = loaded[part]
    assert loaded == value and type(loaded) is type(value)


def test_null_does_not_stand_for_a_number(recipe):
    """H07"""
    assert problems(recipe(), "algorithm.learning_rate=null") == (
        "algorithm.learning_rate = null: must be a number > 0",
    )


def test_a_section_whose_keys_are_all_commented_out_says_nothing(recipe):
    assert load_recipe(recipe("trainer:\n  # steps: 3\n")).config.trainer.steps == 30


def test_an_unset_variable_is_an_error_that_names_it(recipe):
    """H08"""
    os.environ.pop("QUINTAIN_TEST_ROOT", None)
    (problem,) = problems(recipe('model:\n  path: "${QUINTAIN_TEST_ROOT}/x"\n'))
    assert "tiny.yaml, line 5" in problem
    assert "QUINTAIN_TEST_ROOT is not set; set it, or write ${QUINTAIN_TEST_ROOT:-default}" in problem


@pytest.mark.parametrize(
    ("value", "text", "path"),
    [
        ("/data", "${QUINTAIN_TEST_ROOT}/x", "/data/x"),
        ("", "/y${QUINTAIN_TEST_ROOT}/x", "/y/x"),
        ("/data", "${QUINTAIN_TEST_ROOT:-/other}/x", "/data/x"),
        ("", "${QUINTAIN_TEST_ROOT:-/other}/x", "/other/x"),
        (None, "${QUINTAIN_TEST_ROOT:-/other}/x", "/other/x"),
        (None, "/a/$${QUINTAIN_TEST_ROOT}", "/a/${QUINTAIN_TEST_ROOT}"),
        (None, "/a/$HOME", "/a/$HOME"),
    ],
)
def test_variables_are_put_in_where_set_empty_or_defaulted(recipe, value: str | None, text: str, path: str):
    """H08"""
    os.environ.pop("QUINTAIN_TEST_ROOT", None)
    if value is not None:
        os.environ["QUINTAIN_TEST_ROOT"] = value
    try:
        assert load_recipe(recipe(f'model:\n  path: "{text}"\n')).config.model.path == path
    finally:
        os.environ.pop("QUINTAIN_TEST_ROOT", None)


def test_a_variable_alone_may_be_a_number_and_an_empty_one_is_empty_text(recipe):
    """H08"""
    os.environ["QUINTAIN_TEST_SEED"], os.environ["QUINTAIN_TEST_EMPTY"] = "12e2", ""
    try:
        config = load_recipe(
            recipe("seed: ${QUINTAIN_TEST_SEED}\ntracking: \n  experiment: ${QUINTAIN_TEST_EMPTY}\n")
        ).config
    finally:
        del os.environ["QUINTAIN_TEST_SEED"], os.environ["QUINTAIN_TEST_EMPTY"]
    assert (config.seed, config.tracking.experiment) == (1200, "")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1\nseed: 2\n", "line 5: the key 'seed' is given twice (first in line 4); keep one"),
        ("trainer: {steps: 1, steps: 2}\n", "the key 'steps' is given twice"),
        ("trainer: [\n", "not valid YAML"),
        ("seed: !!python/object:os.system {}\n", "not valid YAML"),
        ("---\nname: two\n", "not valid YAML"),
        ("seed: 1\x07\n", "line 4: not valid YAML: the character U+0007 may not stand in it"),
        (f"model: {'[' * 3000}{']' * 3000}\n", "nested deeper than"),
        (f"model: {'[' * 60}{']' * 60}\n", "nested deeper than"),
        ("model: &a [*a, *a]\n", "an anchor that holds itself"),
        ("model: &a {path: *a}\n", "an anchor that holds itself"),
        ("seed: !!bool maybe\n", "does not fit its `!!` tag"),
        ("seed: !!timestamp maybe\n", "does not fit its `!!` tag"),
        ("seed: !!float ''\n", "does not fit its `!!` tag"),
        ("seed: !!int maybe\n", "not valid YAML"),
        (
            "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else '1'] * 9)}]\n" for i in range(9)),
            "more than 100000",
        ),
    ],
)
def test_what_is_no_good_yaml_is_refused_with_its_place(recipe, text: str, told: str):
    (problem,) = problems(recipe(text))
    assert "tiny.yaml" in problem and told in problem


@pytest.mark.parametrize("content", [b"- a\n- b\n", b"just text\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "odd.yaml").write_bytes(content)
    with pytest.raises(RecipeError, match=r"odd\.yaml"):
        load_recipe(tmp_path / "odd.yaml")


def test_a_recipe_that_is_not_there_is_answered_with_near_names(tmp_path: Path):
    with pytest.raises(RecipeError, match=r"no such recipe; there is .*calculator\.yaml"):
        load_recipe(tmp_path / "calculater.yaml")


def test_an_alias_in_the_file_is_not_changed_by_an_override_of_its_twin(recipe):
    text = "name: tiny\nenvironment:\n  id: quintain/Calculator-v0\n  kwargs: {a: &x {n: 1}, b: *x}\n"
    config = load_recipe(recipe(base=text), ["environment.kwargs.a.n=2"]).config
    assert config.environment.kwargs == {"a": {"n": 2}, "b": {"n": 1}}


LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(
    st.dictionaries(
        st.text(), st.recursive(LEAVES, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=8)
    )
)
def test_what_is_dumped_is_read_back_equal(data: dict):
    assert parse_yaml(dump_yaml(data), origin="dump") == data
