"""What long commands say where nobody watches a bar."""

import pytest

from training.progress_bar import progress


def test_tasks_that_report_in_turn_are_each_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as on_progress:
        for done in range(3):
            on_progress("layer 0", done, 3)
            on_progress("layer 1", done, 3)
    assert capsys.readouterr().err.splitlines() == ["layer 0 (0 of 3)", "layer 1 (0 of 3)"]
