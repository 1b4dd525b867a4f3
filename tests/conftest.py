"""What all tests share: the list of golden cases that are checked for repaired behaviour, at the end of the run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

# Read when torch is imported: its threads must not spin while a test's other processes want the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A job in the background of a script begins with SIGINT ignored, and so do its children; tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_PROPERTY = "golden_repaired"


@pytest.fixture
def note_repaired(record_property: Callable[[str, object], None]) -> Callable[[str, str], None]:
    """`note_repaired(output, defect)`: this output pins a defect of the reference; the repair is checked instead.

    Travels in the test's report, so that it is listed under pytest-xdist too.
    """

    def note(output: str, defect: str) -> None:
        record_property(_PROPERTY, f"{output}: {defect}")

    return note


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sweeps run only where a marker expression asks for them."""
    if config.option.markexpr:
        return
    sweeps = [item for item in items if item.get_closest_marker("sweep")]
    if sweeps:
        config.hook.pytest_deselected(items=sweeps)
        items[:] = [item for item in items if item not in sweeps]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    notes = [str(value) for report in reports for name, value in report.user_properties if name == _PROPERTY]
    if notes:
        terminalreporter.section("golden outputs that pin a defect, checked for the repaired behaviour")
        for note in sorted(set(notes)):
            terminalreporter.line(note)
