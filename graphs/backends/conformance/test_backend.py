"""The cases as tests: `pytest --graphs-backend module:Backend`."""

from __future__ import annotations

import pytest

from graphs.backends.conformance import CASES, Case, NotConformant, Refused, Subject, load


@pytest.fixture(scope="session")
def graphs_subject(request: pytest.FixtureRequest) -> Subject:
    """The backend of the command line."""
    backend = request.config.getoption("graphs_backend", None)
    if backend is None:
        pytest.fail("name the backend: --graphs-backend module:Backend", pytrace=False)
    return load(backend, request.config.getoption("graphs_device"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_graphs_backend(graphs_subject: Subject, case: Case) -> None:
    """One guarantee."""
    failed = refused = ""
    try:
        case.run(graphs_subject)
    except Refused as error:
        refused = str(error)
    except NotConformant as error:
        failed = str(error)
    if failed:  # outside of the handler, so that pytest shows no chain of errors
        pytest.fail(failed, pytrace=False)
    if refused:
        pytest.skip(refused)
