"""What a run shows of itself is text, whatever stands in it."""

import pytest
from rich.progress import Progress as Bar

from rollout.progress import Progress
from scripts import terminal
from scripts.terminal import ProgressBar

PAUSED = "paused: no-engine: 2 engines are dead; the last to fail: FileNotFoundError [/models/x] is not [bold] a folder"


@pytest.mark.parametrize("live", [False, True])
def test_an_error_in_square_brackets_is_shown_and_ends_no_run(capsys, monkeypatch, live):
    monkeypatch.setattr(terminal, "LOG_LINE_SECONDS", 0.0)
    bar = ProgressBar("forecasts")
    progress = Progress(
        total=9,
        done=1,
        running=0,
        failures={},
        retried=0,
        output_tokens=0,
        price=0.0,
        seconds=1.0,
        done_now=1,
        stage=PAUSED,
    )
    bar.run(progress)
    if live:
        shown: Bar = bar._bar
        terminal.console.print(shown.get_renderable())
    assert "[/models/x] is not [bold] a folder" in " ".join(capsys.readouterr().out.split())
