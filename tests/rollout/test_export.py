"""An export holds what the ledger holds, loads with `datasets`, and takes the same memory for any size of run."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from datasets import load_dataset
from mirrored_run import EVENTS, EVERY_KEY, lay, packed, record

import rollout.export
from cluster.failures import DataError, SettingsError
from rollout.export import export_run
from rollout.packed import pack
from rollout.run import RunDirectory
from rollout.trajectory import Message, ShownArticle, ToolCall, ToolResult, Trajectory, Turn

DAY = EVERY_KEY[0].date
CALL = ToolCall(id="c1", name="search", arguments='{"query": "ü"}')
TURNS = (
    Turn(
        messages=(Message(role="system", content="s"), Message(role="user", content="u\u2028")),
        tools=("search",),
        prompt_ids=(1, 2, 3),
        sampled_ids=(4, 5),
        logprobs=(-0.1, -1e-9),
        text="",
        reasoning="hm",
        tool_calls=(CALL,),
        results=(ToolResult(call_id="c1", name="search", text="t", shown=(ShownArticle(article_id="a", day=DAY),)),),
        engine="engine-0.1",
        weights="w",
    ),
    Turn(
        messages=(Message(role="tool", content="t", call_id="c1", name="search"),),
        prompt_ids=(6,),
        sampled_ids=(7,),
        logprobs=(-2.5,),
        text="<answer>{}</answer>",
        weights="w",
    ),
)


def loaded(folder, name):
    # A cache of its own: the user's is keyed by the folder's name.
    return load_dataset(str(folder), name, split="train", cache_dir=folder.parent / "cache" / folder.name)


@pytest.fixture
def run(tmp_path):
    made = lay(RunDirectory(tmp_path / "run"))
    with made.ledger() as ledger:
        ledger.commit([pack(record(EVERY_KEY[0], 0.25), Trajectory(turns=TURNS, tokenizer="t", transcript="exact"))])
        ledger.commit([packed(EVERY_KEY[1], kind="model", reason="no-answer"), pack(record(EVERY_KEY[2]), None)])
        ledger.commit([packed(k, kind="infrastructure") for k in EVERY_KEY[3:6]])
        ledger.retry({"infrastructure"}, "asked for")
        ledger.commit([pack(record(EVERY_KEY[3]), Trajectory(turns=TURNS, transcript="rendered"))])
    return made


def test_an_export_loads_and_streams_with_datasets(run, tmp_path):
    summary = export_run(run.path, tmp_path / "out")
    assert (summary.forecasts, summary.open) == (4, len(EVERY_KEY) - 4)
    files = str(tmp_path / "out" / "forecasts" / "*.parquet")
    rows = list(load_dataset("parquet", data_files=files, streaming=True, split="train"))
    by_name = list(load_dataset(str(tmp_path / "out"), "forecasts", streaming=True, split="train"))
    assert rows == by_name
    assert [(r["event"], r["date"], r["mode"], r["rollout"]) for r in rows] == [
        (k.event, k.date, k.mode, k.rollout) for k in EVERY_KEY[:4]
    ]
    first, second, third, fourth = rows
    assert first["probabilities"] == [{"label": "YES", "probability": 0.25}, {"label": "NO", "probability": 0.75}]
    assert first["token_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert first["mask"] == [0, 0, 0, 1, 1, 0, 1]
    assert first["logprobs"] == [-0.1, -1e-9, -2.5]
    assert [m["role"] for m in first["messages"]] == ["system", "user", "assistant", "tool", "assistant"]
    assert first["messages"][1]["content"] == "u\u2028"
    assert first["messages"][2]["tool_calls"] == [CALL.model_dump()]
    assert first["shown"] == [{"article_id": "a", "day": DAY}]
    assert [t["reasoning"] for t in first["turns"]] == ["hm", ""]
    assert (first["transcript"], first["tokenizer"], first["turns"][0]["weights"]) == ("exact", "t", "w")
    assert (second["failure_kind"], second["failure_reason"]) == ("model", "no-answer")
    assert (third["transcript"], third["messages"], third["failure_kind"]) == (None, None, None)
    assert fourth["failure_kind"] is None, "what was taken back is not exported"
    assert (fourth["transcript"], fourth["token_ids"], fourth["logprobs"]) == ("rendered", None, None)
    assert len(fourth["messages"]) == 5


def test_no_row_of_a_forecast_holds_the_answer(run, tmp_path):
    export_run(run.path, tmp_path / "out")
    names = set(pq.read_schema(next((tmp_path / "out" / "forecasts").iterdir())).names)
    assert not names & {"outcome", "closed", "beliefs"}
    events = list(loaded(tmp_path / "out", "events"))
    assert [(e["event"], e["outcome"]) for e in events] == [(e.id, list(e.outcome)) for e in EVENTS]
    export_run(run.path, tmp_path / "bare", outcomes=False)
    bare = loaded(tmp_path / "bare", "events")
    assert not set(bare.column_names) & {"outcome", "closed"}
    assert "Outcomes were left out" in (tmp_path / "bare" / "README.md").read_text()
    assert not (tmp_path / "bare" / "beliefs").exists()


def test_market_beliefs_are_exported_when_asked_for(tmp_path):
    event = EVENTS[0].model_copy(update={"beliefs": {DAY: {"YES": 0.3, "NO": 0.7}}})
    run = lay(RunDirectory(tmp_path / "run"), events=[event], keys=EVERY_KEY[:1])
    export_run(run.path, tmp_path / "out", beliefs=True)
    rows = list(loaded(tmp_path / "out", "beliefs"))
    assert rows == [
        {"event": event.id, "day": DAY, "option": "YES", "probability": 0.3},
        {"event": event.id, "day": DAY, "option": "NO", "probability": 0.7},
    ]


def test_the_card_says_what_the_files_are(run, tmp_path):
    export_run(run.path, tmp_path / "out", licence="cc-by-4.0")
    _, block, text = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    head = yaml.safe_load(block)
    assert head["license"] == "cc-by-4.0"
    assert [c["config_name"] for c in head["configs"]] == ["forecasts", "events"]
    assert run.manifest().fingerprint in text
    assert "| m | memory-free | no-answer | 1 |" in text
    assert "| m | memory-free | none | 3 |" in text
    for name in pq.read_schema(next((tmp_path / "out" / "forecasts").iterdir())).names:
        assert f"| `{name}` |" in text


def test_files_are_split_by_size_and_keep_every_row(run, tmp_path, monkeypatch):
    with run.ledger() as ledger:
        ledger.commit([packed(k) for k in EVERY_KEY])
    monkeypatch.setattr(rollout.export, "GROUP_ROWS", 10)
    export_run(run.path, tmp_path / "out", file_mib=0)
    files = sorted((tmp_path / "out" / "forecasts").iterdir())
    assert [f.name for f in files[:2]] == ["forecasts-00000-of-00020.parquet", "forecasts-00001-of-00020.parquet"]
    assert len(files) == 20
    assert all(pq.ParquetFile(f).metadata.num_rows <= 10 for f in files)
    rows = loaded(tmp_path / "out", "forecasts")
    assert rows["event"] == [k.event for k in EVERY_KEY]


def test_memory_does_not_grow_with_the_run(tmp_path):
    event = EVENTS[0]
    keys = [EVERY_KEY[0].model_copy(update={"rollout": i}) for i in range(240)]
    turns = tuple(t.model_copy(update={"messages": (Message(role="user", content="x" * 200_000),)}) for t in TURNS)
    whole = pack(record(keys[0]), Trajectory(turns=turns, transcript="exact"))

    def peak(count):
        run = lay(RunDirectory(tmp_path / f"run{count}"), events=[event], keys=keys[:count])
        with run.ledger() as ledger:
            ledger.commit(
                [whole.model_copy(update={"key": k, "record": record(k).model_dump_json()}) for k in keys[:count]]
            )
        tracemalloc.start()
        export_run(run.path, tmp_path / f"out{count}")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    small, large = peak(60), peak(240)
    assert large < 1.3 * small, f"{small} bytes for 60 forecasts, {large} for 240"


def test_a_folder_that_holds_something_is_not_written_to(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(SettingsError, match="holds something already"):
        export_run(run.path, tmp_path / "out")
    with pytest.raises(DataError, match="is not a run directory"):
        export_run(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_a_killed_export_left_is_replaced(run, tmp_path):
    (tmp_path / "out.part" / "forecasts").mkdir(parents=True)
    (tmp_path / "out.part" / "forecasts" / "forecasts-00000.parquet").write_text("half")
    export_run(run.path, tmp_path / "out")
    assert not (tmp_path / "out.part").exists()
    assert loaded(tmp_path / "out", "forecasts").num_rows == 4


def test_events_without_any_forecast_make_an_export_too(tmp_path):
    run = lay(RunDirectory(tmp_path / "run"))
    assert export_run(run.path, tmp_path / "out").forecasts == 0
    assert pq.read_table(tmp_path / "out" / "forecasts").num_rows == 0


def test_the_command_exports(run, tmp_path):
    command = [
        sys.executable,
        "-m",
        "scripts",
        "export",
        run.path,
        "--out",
        tmp_path / "out",
        "--no-outcomes",
        "--beliefs",
    ]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "4 forecasts" in ended.stdout
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["README.md", "beliefs", "events", "forecasts"]
