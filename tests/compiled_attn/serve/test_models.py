"""The list of models, which releases of transformers ask for by different names."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("transformers", minversion="5.23", reason="needs the extra serve")
pytest.importorskip("fastapi", reason="needs the extra serve")

from compiled_attn.serve.app import app_of


def test_the_installed_transformers_lists_the_served_model() -> None:
    served: Any = MagicMock()
    served.name = "tiny"
    routes: dict[str, Any] = {route.path: route for route in app_of(served).routes}
    listed = json.loads(routes["/v1/models"].endpoint().body)
    assert [each["id"] for each in listed["data"]] == ["tiny"]
