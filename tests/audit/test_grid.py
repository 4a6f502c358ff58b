"""The grid: every group set with every block size, drafts and runner; and Moonstep clean in it."""

from __future__ import annotations

import doctest
import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hybrid_mutants
import pytest
from typer.testing import CliRunner
from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size

from moonstep.audit import connectors, driver, grid, groupsets, pool, reach, scenarios, shape
from moonstep.audit.audit import Order, Verdict, plan
from moonstep.audit.engineconfig import ConnectorChoice
from moonstep.audit.findings import Kind
from moonstep.audit.jobs import ScenarioJob
from moonstep.audit.scenarios.stage import Result, Scenario, Stage, Status, play, with_groups
from moonstep.audit.shape import Cell, Shape
from moonstep.cli import progress
from moonstep.cli.main import app

MOONSTEP = ConnectorChoice("MoonstepConnector")
VARIANTS = connectors.variants_of(MOONSTEP)
CELLS = tuple(grid.cells())
PLACES = list(dict.fromkeys((cell.groups, cell.blocks) for cell in CELLS))


def a_cell(place: tuple[str, str]) -> Cell:
    """One of the cells of a group set and block size that Moonstep does not refuse."""
    here = [cell for cell in CELLS if (cell.groups, cell.blocks) == place]
    here = [cell for cell in here if not (cell.drafts and "state" in cell.groups)]
    return here[PLACES.index(place) % len(here)]


LARGE = [place for place in PLACES if "64" in place[1] or "=" in place[1]]
UNEQUAL = [a_cell(place) for place in PLACES if "=" in place[1]]


def test_every_cell_is_there_once() -> None:
    counts = Counter(cell.groups for cell in CELLS)
    assert set(counts) == set(grid.SETS)
    assert counts["full"] == 3 * 2 * 2, "block sizes, drafts, runners"
    assert counts["full+window"] == (3 + 2 * 2) * 2 * 2, "and two kinds two or four times as long"
    assert counts["full+state"] == (3 + 2) * 2 * 2, "states' blocks are as long as the engine's"
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_cells_are_chosen_by_what_their_name_begins_with() -> None:
    assert grid.chosen(["all"]) == CELLS
    assert {cell.groups for cell in grid.chosen(["full"])} == {"full"}
    (one,) = grid.chosen(["full+window/16,window=64/drafts/v2"])
    assert one == Cell("full+window", 16, True, "v2", "window", 4)
    assert {cell.blocks for cell in grid.chosen(["full+window/16"])} == {"16"}
    with pytest.raises(ValueError, match="no cell 'full/8'"):
        grid.chosen(["full/8"])


def test_a_scenario_alone_is_played_as_it_is_among_the_others() -> None:
    """Or the replay command of a finding would play something else."""
    for cell in CELLS:
        together = plan(Order(MOONSTEP, grid.SCENARIOS, 0, 0, 1, cell=cell))[0]
        for name in grid.SCENARIOS:
            alone = plan(Order(MOONSTEP, (name,), 0, 0, 1, cell=cell))[0]
            wanted = [job for job in together if isinstance(job, ScenarioJob)]
            assert alone == [job for job in wanted if job.scenario == name], cell.name
            assert alone
    assert sorted(grid.turn_of(one.name) for one in scenarios.ALL) == list(
        range(len(scenarios.ALL))
    )


def test_both_runners_together_play_a_scenario_in_all_settings_and_schedulings() -> None:
    cells = grid.chosen(["full/16/plain"])
    for turn in range(2):
        played = [run for cell in cells for run in grid.stagings(cell, VARIANTS, turn)]
        assert sorted(variant for variant, _ in played) == sorted(VARIANTS)
        assert {engine.asynchronous for _, engine in played} == {True, False}
        assert all(len(list(grid.stagings(cell, [""], turn))) == 1 for cell in cells)


@pytest.mark.parametrize("cell", UNEQUAL, ids=lambda cell: cell.name)
def test_blocks_are_unequal_as_the_engine_makes_them(cell: Cell) -> None:
    """From layers that need less memory a token, all with the engine's ``block_size``."""
    engine = driver.random_history(1, cell=cell)[0]
    wanted = groupsets.rank_specs(engine)[0]
    given = {name: spec.copy_with_new_block_size(16) for name, spec in wanted.items()}
    assert unify_kv_cache_spec_page_size(given) == wanted
    tokens = {spec.block_size for spec in wanted.values()}
    assert tokens == {16, 16 * cell.longer_times}


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if "window" in cell.groups], ids=lambda cell: cell.name
)
def test_wide_windows_need_more_than_two_of_their_blocks(cell: Cell) -> None:
    made = with_groups(grid.shape_of(cell, 0), cell.groups)
    if cell.longer:
        made = shape.lengthened(made, cell.longer, cell.longer_times)
    made = scenarios.by_name("round-trip-wide").regroup(made)
    tokens = groupsets.block_tokens(made, "window")
    needed = reach.needed_blocks(8 * tokens, tokens, made.window_tokens, recurrent=False)
    assert len(needed) > 2


@pytest.mark.parametrize("place", LARGE, ids="/".join)
def test_a_history_is_the_cells_and_clean(place: tuple[str, str]) -> None:
    cell = a_cell(place)
    outcome = driver.run_seed(PLACES.index(place), MOONSTEP, cell=cell)
    made = outcome.shape
    assert (made.groups, made.block_tokens, made.longer) == (
        *place[:1],
        cell.block_tokens,
        cell.longer,
    )
    assert (made.runner, made.drafts > 0) == (cell.runner, cell.drafts)
    assert outcome.finding is None, f"{cell.name}: {outcome.finding}"


@pytest.mark.parametrize("cell", UNEQUAL, ids=lambda cell: cell.name)
def test_blocks_of_unequal_size_make_round_trips(cell: Cell) -> None:
    number = UNEQUAL.index(cell)
    name = grid.SCENARIOS[number % 3]
    run = grid.shape_of(cell, number)
    result = play(scenarios.by_name(name), run, MOONSTEP, VARIANTS[number % 4], cell=cell)
    assert result.finding is None, f"{name}: {result.finding}"
    assert result.status in (Status.CLEAN, Status.NOT_APPLICABLE)


@pytest.mark.parametrize("blocks", ["16", "16,full=64", "16,window=64"])
def test_the_engine_has_lost_all_it_had_once_it_is_to_forget(blocks: str) -> None:
    """Also where most blocks of a window come back without a name, and are taken again first."""
    (cell,) = grid.chosen([f"full+window/{blocks}/plain/v1"])
    left: list[object] = []

    def body(stage: Stage) -> None:
        stage.arrive("prompt", 3 * stage.engine.unit_tokens)
        stage.settle()
        before = pool.named(stage.engine.scheduler)
        stage.engine.scheduler.reset_prefix_cache = lambda *options: left.append(
            before & pool.named(stage.engine.scheduler)
        )
        stage.forget()
        assert before

    play(Scenario("lost", "", body), grid.shape_of(cell, 0), ConnectorChoice(None), cell=cell)
    assert left == [set()]


def test_a_mutant_is_found_in_a_cell() -> None:
    (cell,) = grid.chosen(["full+window/16,window=64/plain/v1"])
    scenario = scenarios.by_name("round-trip")
    with hybrid_mutants.CASES["last_group_skipped"].mutant():
        result = play(scenario, grid.shape_of(cell, 0), MOONSTEP, "eager", cell=cell)
    assert result.finding is not None
    assert result.finding.kind is Kind.WRONG_KV


def verdict_of(cell: Cell, *results: Result) -> Verdict:
    """An audit of a cell that came to these results."""
    order = Order(MOONSTEP, (), 0, 0, 1, cell.groups, cell=cell)
    return Verdict(order, list(results))


def test_a_row_says_what_it_rests_on() -> None:
    cell = CELLS[0]
    clean = Result("answered", Shape(), Status.CLEAN, counts={"steps": 9, "loaded_tokens": 32})
    empty = Result("answered", Shape(), Status.CLEAN, counts={"steps": 9})
    refused = Result("answered", Shape(), Status.NOT_APPLICABLE, reason="refused: no")
    row = grid.row_of(verdict_of(cell, clean, clean))
    assert (row.runs, row.steps, row.promised_tokens) == (2, 18, 64)
    assert not row.is_unproven
    assert grid.row_of(verdict_of(cell, empty)).is_unproven
    row = grid.row_of(verdict_of(cell, refused))
    assert row.refused == "no"
    assert not row.is_unproven
    assert not grid.row_of(verdict_of(cell, refused, clean)).refused


def test_a_run_over_cells_writes_a_row_for_each(tmp_path: Path) -> None:
    out = tmp_path / "grid.json"
    arguments = ["--grid", "full/16/plain/v1", "--grid", "full+state/16/drafts/v2"]
    more = ["--scenario", "answered", "--steps", "60", "--jobs", "1", "--json", str(out)]
    result = CliRunner().invoke(app, ["audit", *arguments, *more])
    assert result.exit_code == 0, result.stdout
    played, refused = json.loads(out.read_text())["cells"]
    assert played["name"] == "full/16/plain/v1"
    assert (played["runs"], played["histories"], played["findings"]) == (2, 1, 0)
    assert played["promised_tokens"] > 0
    assert "beside recurrent layers" in refused["refused"]
    assert "full/16/plain/v1" in result.stdout


@pytest.mark.parametrize("scenario", ["none", "round-trip-wide"])
def test_a_cell_whose_histories_are_all_refused_is_refused(tmp_path: Path, scenario: str) -> None:
    """Also where a scenario does not apply: nothing was played that could have promised."""
    out = tmp_path / "grid.json"
    arguments = ["--grid", "full+state/16/drafts/v2", "--scenario", scenario, "--steps", "60"]
    result = CliRunner().invoke(app, ["audit", *arguments, "--jobs", "1", "--json", str(out)])
    assert result.exit_code == 0, result.stdout
    (row,) = json.loads(out.read_text())["cells"]
    assert "beside recurrent layers" in row["refused"]
    assert "nothing was promised" not in result.stdout


def test_a_history_that_promises_nothing_replays_without_findings() -> None:
    """Only the grid's scenarios have to promise something: what they warm is asked for again."""
    arguments = ["--grid", "full/64/plain/v1", "--scenario", "none", "--steps", "1"]
    result = CliRunner().invoke(app, ["audit", *arguments, "--jobs", "1"])
    assert "0 findings" in result.stdout
    assert result.exit_code == 0, result.stdout


@pytest.mark.parametrize(("is_stopped", "status"), [(True, 130), (False, 1)])
def test_cells_that_are_over_are_written_whatever_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool, status: int
) -> None:
    """Ctrl-C, or an error, in the second cell."""

    @contextmanager
    def watched(console: object) -> Iterator[Callable[[str, int, int], None]]:
        def told(phase: str, done: int, total: int) -> None:
            if "(2 of 2)" in phase and is_stopped:
                signal.raise_signal(signal.SIGINT)
            elif "(2 of 2)" in phase:
                raise RuntimeError("no more")

        yield told

    monkeypatch.setattr(progress, "progress", watched)
    out = tmp_path / "grid.json"
    arguments = ["--grid", "full/16/plain", "--scenario", "answered", "--steps", "0"]
    result = CliRunner().invoke(app, ["audit", *arguments, "--jobs", "1", "--json", str(out)])
    assert result.exit_code == status, result.stdout
    written = json.loads(out.read_text())
    assert [cell["name"] for cell in written["cells"]] == ["full/16/plain/v1"]
    assert written["cells_wanted"] == 2
    assert "full/16/plain/v1" in result.stdout
    assert "1 of 2 were run" in result.stdout


def test_examples_in_the_text_hold() -> None:
    for module in (shape, grid):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0
