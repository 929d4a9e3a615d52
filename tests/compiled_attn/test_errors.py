"""The errors module holds every public error, and the packages that raise one offer the same."""

from __future__ import annotations

import importlib

import pytest

from compiled_attn import errors

OFFERED = {
    "compiled_attn.cache.blocks": ["DuplicateRequest", "OutOfBlocks", "UnknownRequest"],
    "compiled_attn.engine": ["ConfigError"],
    "compiled_attn.models.hf": ["ModelChanged", "ModelRefused"],
    "compiled_attn.models": ["ModelError"],
    "compiled_attn.workloads": ["TraceError"],
}


@pytest.mark.parametrize("package", OFFERED)
def test_a_package_offers_the_errors_that_it_raises(package):
    offering = importlib.import_module(package)
    for name in OFFERED[package]:
        assert getattr(offering, name) is getattr(errors, name)
        assert name in offering.__all__


def test_every_error_of_the_module_is_public():
    classes = [name for name, value in vars(errors).items() if isinstance(value, type)]
    defined = [name for name in classes if getattr(errors, name).__module__ == errors.__name__]
    assert sorted(defined) == sorted(errors.__all__)
