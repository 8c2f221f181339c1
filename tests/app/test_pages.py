"""Every page from the entry point, over stores that are empty, busy, full, broken and strange. No browser, no model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from streamlit.testing.v1 import AppTest

from app.runs import queue
from app.runs.checkpoints import remove_unfinished, unfinished
from app.runs.library import add_model, added_models
from app.runs.store import RunState, Store
from app.runs.sweep import PRESETS, SweepRequest
from pruning.methods import METHODS
from tests.app.factories import BLOCKS, PARTS, fill, leave_blocks, make_outcome, make_run, make_spec, sharing
from tests.app.test_combinations import NARROW

ROOT = Path(__file__).parents[2]
PAGES = {"Run": "app_pages/run.py", "Compare": "app_pages/compare.py", "Models": "app_pages/models.py"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PODA_HOME", str(tmp_path))
    monkeypatch.delenv("PODA_DATABASE", raising=False)
    return tmp_path


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    opened = Store()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def workers() -> Iterator[list[str]]:
    """No page of these tests may start a real worker; the devices one was started for."""
    started: list[str] = []
    with patch("app.runs.queue.start_worker", started.append):
        yield started


def visit(title: str, **query: str) -> AppTest:
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=30)
    for name, value in query.items():
        app.query_params[name] = value
    app.run()
    if PAGES[title] != PAGES["Run"]:
        app.switch_page(PAGES[title]).run()
    assert not app.exception
    assert [one.value for one in app.title] == [title]
    return app


def compare(view: str) -> AppTest:
    """Compare with one of its views open."""
    return visit("Compare", view=view)


def words(app: AppTest) -> str:
    """All text on the page."""
    kinds = ("text", "markdown", "caption", "subheader", "header", "error", "badge")
    return "\n".join(str(one.value) for kind in kinds for one in app.get(kind))


@pytest.mark.parametrize("title", PAGES)
@pytest.mark.parametrize("filled", [0, 1, 30])
def test_every_page_opens(store: Store, title: str, filled: int) -> None:
    fill(store, filled, others=filled == 30, artifacts=True)
    visit(title)


def test_an_empty_run_page_offers_the_preset_first(store: Store) -> None:
    app = visit("Run")
    primary = [button.key for button in app.button if button.proto.type == "primary"]
    assert primary == [f"preset_{next(iter(PRESETS))}"]
    assert "as soon as a run is finished" in words(app)


def test_the_preset_asks_for_its_runs_in_one_click(store: Store, workers: list[str]) -> None:
    app = visit("Run")
    name, preset = next(iter(PRESETS.items()))
    app.button(key=f"preset_{name}").click().run()
    assert not app.exception
    asked = {spec.run_id for spec in preset.request.specs()}
    assert asked <= {run.run_id for run in store.runs([RunState.QUEUED])}
    assert workers
    assert words(app).count("waiting") == len(asked)


def test_the_form_says_what_it_will_make_and_starts_it(store: Store) -> None:
    app = visit("Run")
    app.get_by_key("methods").set_value(["magnitude", "sparsegpt"])
    app.multiselect(key="sparsities").set_value(["70%", "80%"])
    app.get_by_key("stored").set_value(["none", "int8"]).run()
    assert "9 variants, one of them the dense model to compare with" in words(app)
    app.button(key="start").click().run()
    assert not app.exception
    labels = {run.label for run in store.runs([RunState.QUEUED])}
    assert labels == {"Dense"} | {
        f"{method} {share}{stored}"
        for method in ("Magnitude", "SparseGPT")
        for share in ("70%", "80%")
        for stored in ("", " + int8")
    }


def test_allocations_and_statistics_are_chosen_in_the_form(store: Store) -> None:
    app = visit("Run")
    app.multiselect(key="sparsities").set_value(["70%"])
    app.get_by_key("patterns").set_value(["unstructured", "2:4"])
    app.get_by_key("allocations").set_value(["uniform", "owl"])
    app.get_by_key("statistics").set_value("shared").run()
    assert "Left out, as there is no such combination: 2:4 with OWL." in words(app)
    app.button(key="start").click().run()
    assert {run.label for run in store.runs([RunState.QUEUED])} == {
        "Dense",
        "Wanda 70% (shared)",
        "Wanda 70% (OWL, shared)",
        "Wanda 2:4 (shared)",
    }


def test_group_sizes_are_offered_with_quantizations_that_have_groups(store: Store) -> None:
    app = visit("Run")
    app.get_by_key("stored").set_value(["int8"]).run()
    assert not [one for one in app.get("pills") if one.key == "groups"]
    app.get_by_key("methods").set_value(["wanda", "sparsegpt"])
    app.get_by_key("stored").set_value(["int8", "joint-int4"]).run()
    groups = app.get_by_key("groups")
    assert (groups.options, groups.value) == (["32", "64", "128"], [64])
    groups.set_value([32, 128]).run()
    left = "joint int4 after Wanda, joint int4 in groups of 128."
    assert f"Left out, as there is no such combination: {left}" in words(app)
    app.button(key="start").click().run()
    assert {run.label for run in store.runs([RunState.QUEUED])} == {
        *("Dense", "Wanda 50% + int8", "SparseGPT 50% + int8", "SparseGPT 50% + joint int4 g32"),
    }


def test_a_group_that_does_not_fit_the_model_says_which_do(store: Store) -> None:
    app = visit("Run", stored="int4")
    app.get_by_key("groups").set_value([128]).run()
    assert "group 128 does not divide a width of 576 inputs: choose a group of 64 or 32" in words(app)
    assert app.button(key="start").disabled


def test_methods_that_remove_whole_parts_are_offered_apart(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "narrow", NARROW)
    app = visit("Run", sparsities="25%")
    assert "Narrow" not in app.get_by_key("methods").options
    assert "Narrow" in app.get_by_key("parts").options
    app.get_by_key("parts").set_value(["narrow"])
    app.get_by_key("methods").set_value([]).run()
    app.button(key="start").click().run()
    assert {run.label for run in store.runs([RunState.QUEUED])} == {"Dense", "Narrow 25%"}


def test_what_is_there_already_is_said_and_not_made_again(store: Store) -> None:
    for spec in SweepRequest(methods=("wanda",), sparsities=(0.5,)).specs():
        make_run(store, spec)
    app = visit("Run")
    app.multiselect(key="sparsities").set_value(["50%", "80%"]).run()
    assert "3 variants, one of them the dense model to compare with, 2 there already" in words(app)


@pytest.mark.parametrize(
    ("widget", "value", "why"),
    [
        ("sparsities", ["150%"], "0.95"),
        ("sparsities", ["half"], "is not a sparsity"),
    ],
)
def test_a_sweep_that_cannot_be_run_says_why_and_does_not_start(
    store: Store, widget: str, value: list[str], why: str
) -> None:
    app = visit("Run")
    app.multiselect(key=widget).set_value(value).run()
    assert not app.exception
    assert why in words(app)
    assert app.button(key="start").disabled


def test_an_unknown_model_says_why(store: Store, tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    app = visit("Run", model=str(missing))
    assert f"no such folder: {missing}" in words(app)
    assert app.button(key="start").disabled


def test_choices_live_in_the_address(store: Store) -> None:
    app = visit("Run", sparsities="70%")
    assert app.multiselect(key="sparsities").value == ["70%"]


def test_a_running_run_shows_how_far_it_is_and_can_be_cancelled(store: Store) -> None:
    run = make_run(store, state=RunState.RUNNING)
    app = visit("Run")
    (bar,) = app.progress
    assert bar.text == "Compressing, block 13 of 30, about 42 s left"
    assert 0 < bar.value < 100
    app.button(key=f"cancel_{run.key}").click().run()
    assert store.run(run.key).state is RunState.CANCELLING
    assert "Stopping at the next step" in [bar.text for bar in app.progress]
    assert app.button(key=f"cancel_{run.key}").disabled


def test_a_waiting_run_is_cancelled_at_once(store: Store) -> None:
    run = make_run(store, state=RunState.QUEUED)
    app = visit("Run")
    app.button(key=f"cancel_{run.key}").click().run()
    assert store.run(run.key).state is RunState.CANCELLED
    assert not app.progress


def test_all_can_be_cancelled_together(store: Store) -> None:
    for seed in range(12):
        make_run(store, make_spec(seed=seed), state=RunState.QUEUED)
    app = visit("Run")
    assert "and 4 more waiting behind these" in words(app)
    app.button(key="cancel_all").click().run()
    assert {run.state for run in store.runs()} == {RunState.CANCELLED}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (RunState.FAILED, "The disk is full: free 300 MB."),
        (RunState.LOST, "worker was killed"),
        (RunState.CANCELLED, "as asked"),
    ],
)
def test_a_run_that_came_to_nothing_says_so_and_can_be_run_again(store: Store, state: RunState, said: str) -> None:
    run = make_run(store, state=state)
    app = visit("Run")
    assert said in words(app)
    app.button(key=f"again_{run.key}").click().run()
    assert not app.exception
    again = store.find(run.run_id)
    assert again is not None
    assert (again.attempt, again.state) == (2, RunState.QUEUED)
    assert f"again_{run.key}" not in {button.key for button in app.button}


@pytest.mark.parametrize("state", [RunState.LOST, RunState.CANCELLED])
def test_a_stopped_run_says_at_which_block_it_goes_on(store: Store, state: RunState) -> None:
    run = make_run(store, state=state)
    leave_blocks(run.run_id, 12, 30)
    app = visit("Run")
    assert "Start again: it goes on at block 13 of 30." in words(app)
    app.button(key=f"again_{run.key}").click().run()
    assert "goes on at block" not in words(app)


def test_a_finished_run_shows_its_figures_and_is_charted(store: Store) -> None:
    make_run(store, make_spec(None))
    make_run(store, make_spec("wanda", 0.5))
    app = visit("Run")
    assert "MB on disk" in words(app)
    (chart,) = app.get("plotly_chart")
    assert {trace["name"] for trace in json.loads(chart.proto.spec)["data"]} == {"Dense", "Wanda"}


def test_text_that_people_or_files_bring_is_never_markup(store: Store) -> None:
    nasty = "<b>x</b> **y** :red[z] [a](http://b)"
    make_run(store, state=RunState.FAILED, error=nasty)
    add_model(store, nasty)
    for title in PAGES:
        app = visit(title)
        marked_up = [one.value for kind in ("markdown", "caption", "error", "badge") for one in app.get(kind)]
        assert not [text for text in marked_up if ":red[z]" in text or "<b>" in text]
    assert nasty in [one.value for one in visit("Run").text]
    assert nasty in [one.value for one in visit("Models").text]


def test_compare_offers_the_first_run_when_there_is_none(store: Store) -> None:
    app = visit("Compare")
    assert [button.label for button in app.button] == ["Make the first run"]
    (axes,) = app.get("plotly_chart")
    assert json.loads(axes.proto.spec)["data"] == []


def test_compare_draws_quality_by_sparsity_and_by_size(store: Store) -> None:
    fill(store, 12)
    app = visit("Compare")
    assert len(app.get("plotly_chart")) == 2
    assert all(chart.proto.alt for chart in app.get("plotly_chart"))


def test_compare_draws_waiting_times_and_does_not_rank_them(store: Store) -> None:
    fill(store, 12)
    app = compare("Waiting time")
    (bars,) = app.get("plotly_chart")
    assert "not ranked" in bars.proto.alt
    assert "no ranking" in words(app)
    assert "not faster on this machine" in words(app)
    app.get_by_key("waiting").set_value("Prefill time").run()
    assert "Prefill time" in words(app)


def test_compare_lists_every_figure_with_the_source_file(store: Store) -> None:
    fill(store, 12)
    table = compare("Every figure").dataframe[0].value
    assert len(table) == 13
    assert "the file you started from" in table["Variant"].iloc[0]
    assert table["Perplexity"].iloc[0] == table["Perplexity"].iloc[1]


def test_compare_shows_only_what_is_picked(store: Store) -> None:
    fill(store, 12, others=False)
    app = compare("Every figure")
    (picker,) = [one for one in app.get("pills") if one.label == "Variants"]
    picker.set_value(["Dense", "Magnitude 50%"]).run()
    assert list(app.dataframe[0].value["Variant"])[1:] == ["Dense", "Magnitude 50%"]


def test_compare_says_when_nothing_is_picked(store: Store) -> None:
    fill(store, 3, others=False)
    app = visit("Compare")
    (picker,) = [one for one in app.get("pills") if one.label == "Variants"]
    picker.set_value([]).run()
    assert not app.exception
    assert "at least one variant" in words(app)


def test_a_collapsed_variant_is_on_every_view(store: Store) -> None:
    make_run(store, make_spec(None))
    make_run(store, make_spec("magnitude", 0.9), collapsed=True)
    traces = [json.loads(chart.proto.spec)["data"] for chart in visit("Compare").get("plotly_chart")]
    assert [["collapsed"] in [trace.get("text") for trace in drawn] for drawn in traces] == [True, True]
    assert "collapsed" in list(compare("Every figure").dataframe[0].value["Collapsed"])
    assert "collapsed" in words(visit("Run"))


def test_only_collapsed_runs(store: Store) -> None:
    make_run(store, make_spec("magnitude", 0.9), collapsed=True)
    assert len(visit("Compare").get("plotly_chart")) == 2


def test_runs_measured_differently_are_kept_apart_and_named(store: Store) -> None:
    make_run(store, make_spec("wanda", 0.5).model_copy(update={"dtype": "bfloat16"}))
    make_run(store, make_spec("wanda", 0.6).model_copy(update={"dtype": "float32"}))
    app = compare("Every figure")
    assert "1 more run of this model was measured differently" in words(app)
    assert "weights in bfloat16" in words(app)
    assert list(app.dataframe[0].value["Variant"]) == ["Wanda 60%"]
    measured = app.selectbox(key="measured")
    measured.set_value(next(option for option in measured.options if "bfloat16" in option)).run()
    assert list(app.dataframe[0].value["Variant"]) == ["Wanda 50%"]


def test_many_variants_show_the_newest_until_others_are_chosen(store: Store) -> None:
    fill(store, 60, others=False)
    app = visit("Compare")
    (picker,) = [one for one in app.multiselect if one.label == "Variants"]
    assert len(picker.options) == 60
    assert len(picker.value) == 20
    assert "60 variants are comparable; the newest 20 are shown" in words(app)


def test_how_it_was_measured_is_one_click_away(store: Store) -> None:
    run = make_run(store, make_spec("wanda", 0.5))
    app = visit("Compare")
    app.session_state["how_measured"] = True
    app.run()
    lines = dict(app.dataframe[0].value.itertuples(index=False, name=None))
    assert lines["run"].startswith(run.run_id)
    assert lines["device name"] == "Test CPU @ 2 cores"
    assert lines["evaluation, windows"] == "16"


def open_layers(store: Store) -> AppTest:
    app = visit("Compare")
    app.session_state["by_layer"] = True
    app.run()
    assert not app.exception
    return app


def test_every_layer_is_one_click_away_and_not_loaded_before(store: Store) -> None:
    make_run(store, make_spec(None))
    make_run(store, make_spec("sparsegpt", 0.5))
    assert not visit("Compare").dataframe
    app = open_layers(store)
    table = app.dataframe[0].value
    assert len(table) == BLOCKS * len(PARTS)
    assert table["Change of its output (%)"].notna().all()
    maps = [chart for chart in app.get("plotly_chart") if "Maps of" in chart.proto.alt]
    assert len(maps) == 1
    assert "Not every layer could be treated as asked" in words(app)
    said = "2 layers pruned by Wanda: its statistics cannot be inverted (model.layers.3.self_attn.k_proj, "
    assert said + "model.layers.3.self_attn.v_proj)." in words(app)


def test_layers_of_a_method_that_looked_at_no_text_are_a_table_alone(store: Store) -> None:
    make_run(store, make_spec("magnitude", 0.5))
    app = open_layers(store)
    assert len(app.dataframe[0].value) == BLOCKS * len(PARTS)
    assert "Every layer lost the same share, 50%. The method looked at no text" in words(app)
    assert not [chart for chart in app.get("plotly_chart") if "Maps of" in chart.proto.alt]


def test_the_dense_model_has_no_layers_to_report(store: Store) -> None:
    make_run(store, make_spec(None))
    assert "keeps all of its layers as they are" in words(open_layers(store))


def test_a_variant_of_older_days_says_what_is_missing(store: Store) -> None:
    spec = make_spec("wanda", 0.5)
    make_run(store, spec, outcome=replace(make_outcome(spec), layers=[]))
    assert "Run it again to see its layers here" in words(open_layers(store))


def test_time_that_was_shared_is_said_in_the_table(store: Store) -> None:
    for spec in (make_spec(None), sharing("wanda", 0.5)):
        make_run(store, spec, outcome=make_outcome(spec, together=(12, 20.0) if spec.recipe.prune else None))
    table = compare("Every figure").dataframe[0].value
    assert "of which 20 s once for 12 variants" in list(table["Statistics"])[-1]


def test_unfinished_work_is_shown_and_removed_after_asking(store: Store) -> None:
    assert "Unfinished work" not in words(visit("Models"))
    stopped = make_run(store, state=RunState.CANCELLED)
    leave_blocks(stopped.run_id, 12, 30)
    app = visit("Models")
    assert "Unfinished work" in words(app)
    assert "1.20 kB: finished blocks of 1 variant." in words(app)
    app.button(key="ask_unfinished").click().run()
    assert not app.exception
    assert unfinished(stopped.run_id) is not None
    assert "1 run that was stopped will start from the first block" in words(app)
    assert {"keep_unfinished", "remove_unfinished"} <= {button.key for button in app.button}
    remove_unfinished(store)
    app.run()
    assert "Unfinished work" not in words(app)


def test_work_that_is_waited_for_cannot_be_removed(store: Store) -> None:
    leave_blocks(make_run(store, state=RunState.QUEUED).run_id, 12, 30)
    assert visit("Models").button(key="ask_unfinished").disabled


def test_models_shows_the_bundled_one_and_its_rounding(store: Store) -> None:
    assert "rounded to 4 bits" in words(visit("Models"))


def test_a_model_can_be_added_and_taken_off(store: Store) -> None:
    app = visit("Models")
    app.text_input(key="new_model").set_value("owner/name@v1")
    app.form_submit_button[0].click().run()
    assert not app.exception
    assert added_models(store) == ["owner/name@v1"]
    assert "owner/name@v1" in visit("Run").selectbox(key="model").options[1]
    app.button(key="forget_owner/name@v1").click().run()
    assert added_models(store) == []


def test_a_suggestion_is_added_in_one_click(store: Store) -> None:
    app = visit("Models")
    (button, *_) = [button for button in app.button if button.key and button.key.startswith("suggest_")]
    button.click().run()
    assert added_models(store) == [button.key.removeprefix("suggest_")]


def test_a_model_that_cannot_be_added_says_why(store: Store, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").write_bytes(b"x")
    app = visit("Models")
    app.text_input(key="new_model").set_value(str(tmp_path / "old"))
    app.form_submit_button[0].click().run()
    assert "holds pickled weights" in words(app)
    assert added_models(store) == []


def test_files_are_removed_after_asking_and_figures_stay(store: Store) -> None:
    run = make_run(store, make_spec("wanda", 0.5), artifact=True)
    app = visit("Models")
    app.multiselect(key="to_remove").set_value(["Wanda 50%"]).run()
    app.button(key="remove").click().run()
    assert not app.exception
    assert store.run(run.key).artifact is not None
    assert {"keep_files", "remove_files"} <= {button.key for button in app.button}
    queue.remove_artifact(store, run.run_id)
    app.run()
    assert "There is none yet" in words(app)
    assert len(store.results()) == 1


def test_a_database_that_cannot_be_opened_is_said_plainly(home: Path) -> None:
    (home / "poda.sqlite3").write_bytes(b"this is no database" * 100)
    app = AppTest.from_file(str(ROOT / "app" / "main.py"), default_timeout=30).run()
    assert not app.exception
    assert "cannot be opened" in words(app)


def test_no_page_loads_the_engine(store: Store) -> None:
    """In a fresh interpreter: all pages are drawn, and torch, transformers and datasets are not there afterwards."""
    fill(store, 5)
    code = f"""
import sys
from unittest.mock import patch
from streamlit.testing.v1 import AppTest
with patch("app.runs.queue.start_worker", lambda device: None):
    app = AppTest.from_file({str(ROOT / "app" / "main.py")!r}, default_timeout=30).run()
    assert not app.exception
    for page in {sorted(PAGES.values())!r}:
        app.switch_page(page).run()
        assert not app.exception, app.exception
print(sorted({{"torch", "transformers", "datasets", "accelerate"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["[]"], done.stderr
